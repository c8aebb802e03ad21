"""The real actor, on whatever device, against Hugging Face in float32 on the CPU: in numbers for the tests to judge.

`run_cases` starts the ranks once, which then run case after case: importing Megatron takes longer than a case. On a
CPU it runs as well, in bf16, so that nothing but the device and its kernels is new on a GPU.
"""

import dataclasses
import importlib.util
import json
import math
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tests.distributed.launch import end_model_parallel, run_ranks
from tests.distributed.parity import Case, configuration, reduced_gradients
from tests.support.deadlines import scaled

NUM_STEPS = 2
"""Of which the last is measured: delayed scaling takes its scales from the step before."""
UNNOTICEABLE = 1e-9
"""A learning rate at which no weight in bf16 changes"""

Device = Literal["cuda", "cpu"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Of one case, as rank 0 sees it; what is compared with Hugging Face comes from all ranks."""

    logprob_mean: float
    """|difference of a response token's log-prob from Hugging Face's|"""
    logprob_max: float
    cosine: float
    """of the whole gradient with Hugging Face's; NaN if the weights are in FP8, which gradients are not read through"""
    worst_cosine: float
    """of one tensor's gradient, the lowest"""
    worst_tensor: str
    finite: bool
    """whether every gradient on this rank is"""
    skipped_steps: float
    num_microbatches: float
    adam: list[str]
    """classes of the optimizers inside Megatron's"""
    adam_difference: float
    """from torch's AdamW on the same float32 masters and gradients: the largest, in units of the learning rate"""
    layers: list[str]
    """packages of the classes of the model's modules with parameters"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    measured: dict[str, Measurement]
    failures: dict[str, str]
    """what was raised, by case"""
    launch_failure: str
    """why the ranks ended before the last case; empty if they did not"""

    def __getitem__(self, name: str) -> Measurement:
        """Raises AssertionError with the reason if the case was not measured."""
        assert name in self.measured, self.failures.get(name) or self.launch_failure or f"{name} was not run"
        return self.measured[name]


def make_case(
    family: str = "qwen3",
    *,
    device: Device = "cuda",
    precision: str = "bf16",
    parallel: dict[str, Any] | None = None,
    learning_rate: float = UNNOTICEABLE,
    **sections: dict[str, Any],
) -> Case:
    """`sections`: more of the configuration."""
    actor = {"microbatch_tokens": 512, "collective_timeout_seconds": 120} | sections.pop("actor", {})
    optimizer = {"learning_rate": learning_rate, "adam_eps": 1e-8, "clip_grad_norm": 1e6, "weight_decay": 0.1}
    optimizer |= sections.pop("optimizer", {})
    settings: dict[str, Any] = {
        "device": device,
        "precision": precision,
        "actor": actor,
        "optimizer": optimizer,
        **sections,
    }
    settings["rollout"] = {"max_new_tokens": 64}
    return Case(family=family, parallel=parallel or {}, settings=settings)


def run_cases(cases: Mapping[str, Case], world_size: int, device: Device, *, timeout_seconds: float) -> Results:
    """What was measured before a rank failed is kept. On one rank, a case that raises does not end the others."""
    launch_failure = ""
    with tempfile.TemporaryDirectory() as folder:
        encoded = json.dumps({name: dataclasses.asdict(case) for name, case in cases.items()})
        (Path(folder) / "cases.json").write_text(encoded)
        try:
            run_ranks(
                _run_cases,
                world_size,
                folder,
                device,
                timeout_seconds=timeout_seconds,
                with_gpus=device == "cuda",
            )
        except AssertionError as error:
            launch_failure = str(error)
        written = Path(folder) / "results.jsonl"
        lines = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    return Results(
        measured={line["name"]: Measurement(**line["measured"]) for line in lines if "measured" in line},
        failures={line["name"]: line["failure"] for line in lines if "failure" in line},
        launch_failure=launch_failure,
    )


def _run_cases(folder: str, device: Device) -> None:
    import torch
    import torch.distributed as dist

    from megatron_a3po.parallel.layout import RankInfo, init_distributed

    if device == "cpu":
        from megatron_a3po import cpu

        cpu.install()
    info = RankInfo.from_environment()
    torch.set_num_threads(1 if device == "cpu" else 4)
    init_distributed(info, device, scaled(120.0))
    cases = json.loads((Path(folder) / "cases.json").read_text())
    for name, case in ((name, Case(**fields)) for name, fields in cases.items()):
        model = Path(folder) / case.family
        if info.rank == 0 and not model.exists():
            from tests.gpu.models import save_model

            save_model(case.family, model)
        dist.barrier()
        line: dict[str, Any] = {"name": name}
        try:
            line["measured"] = dataclasses.asdict(measure(case, model, device))
        except Exception as error:
            if info.world_size > 1:
                raise  # the other ranks wait in a collective
            line["failure"] = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"
        _end_case()
        if info.rank == 0:
            with (Path(folder) / "results.jsonl").open("a") as results:
                results.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


def _end_case() -> None:
    import gc

    import torch

    end_model_parallel()
    if importlib.util.find_spec("transformer_engine") is not None:
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

        FP8GlobalStateManager.reset()  # else the next case scales by what this one has seen
    gc.collect()
    torch.cuda.empty_cache()


def measure(case: Case, model: Path, device: Device) -> Measurement:
    """Collective over all ranks, of which the first one has the Hugging Face model."""
    import torch
    import torch.distributed as dist

    from megatron_a3po.actor import build_actor
    from megatron_a3po.runtime.timing import PhaseTimer
    from tests.distributed.plain_training import PlainTrainer, checkpoint_tensors

    config = configuration(case, model)
    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    actor = build_actor(config, device=where, timer=PhaseTimer())
    plain = PlainTrainer.from_folder(model, config) if dist.get_rank() == 0 else None
    gradients: dict[str, torch.Tensor] = {}
    finite: list[bool] = []
    step, adam = actor.optimizer.step, AdamComparison(actor)

    def step_after_reading_gradients() -> Any:
        parameters: list[Any] = [parameter for chunk in actor.model.chunks for parameter in chunk.parameters()]
        finite.extend(bool(parameter.main_grad.isfinite().all()) for parameter in parameters)
        if not config.fp8.parameters:
            gradients.update({name: tensor.cpu() for name, tensor in reduced_gradients(actor).items()})
        # The state of an optimizer in host memory is not where the gradients are.
        return step() if config.optimizer.offload else adam.compare(step)

    actor.optimizer.step = step_after_reading_gradients  # type: ignore[method-assign]
    for number in range(NUM_STEPS):
        batch = _fresh_batch(number, actor.version, plain)
        advantages = torch.randn(len(batch), generator=torch.Generator().manual_seed(number))
        metrics = actor.train_step(batch, advantages)
    cosine, worst = math.nan, (math.nan, "")
    if plain is not None and gradients:
        plain.train_step(batch, advantages, actor.version - 1)
        cosine, worst = _cosines(gradients, checkpoint_tensors(plain.model, gradients=True))
    return Measurement(
        logprob_mean=metrics["fresh_logprob_difference_mean"],
        logprob_max=metrics["fresh_logprob_difference_max"],
        cosine=cosine,
        worst_cosine=worst[0],
        worst_tensor=worst[1],
        finite=all(finite),
        skipped_steps=metrics["skipped_steps"],
        num_microbatches=metrics["num_microbatches"],
        adam=sorted(adam.classes),
        adam_difference=adam.difference,
        layers=_packages(actor.model.chunks),
    )


def _fresh_batch(seed: int, version: int, plain: Any) -> list[Any]:
    """On every rank: trajectories of the present version with Hugging Face's own log-probs."""
    import torch

    from megatron_a3po.parallel.broadcast import broadcast_trajectories
    from tests.distributed.plain_training import random_batch, response_logprobs
    from tests.gpu.models import VOCAB_SIZE

    batch = None
    if plain is not None:
        batch = random_batch(seed, version + 3, plain.model, vocab_size=VOCAB_SIZE, longest=64)
        with torch.no_grad():
            found = response_logprobs(batch, plain.model)
        batch = [
            dataclasses.replace(
                item, behaviour_logprobs=logprobs, weight_versions=torch.full((item.response_length,), version)
            )
            for item, (logprobs, _) in zip(batch, found, strict=True)
        ]
    return broadcast_trajectories(batch)


def _cosines(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[float, tuple[float, str]]:
    """(of everything, (the lowest of one tensor, its name)); tensors that are zero on both sides agree."""
    import torch

    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())

    def cosine(one: Any, other: Any) -> float:
        if not one.any() and not other.any():
            return 1.0
        return float(torch.nn.functional.cosine_similarity(one, other, dim=0))

    pairs = {name: (ours[name].double().flatten(), theirs[name].double().flatten()) for name in ours}
    whole = [torch.cat(side) for side in zip(*pairs.values(), strict=True)]
    return cosine(*whole), min((cosine(*pair), name) for name, pair in pairs.items())


def _packages(chunks: Any) -> list[str]:
    modules = (module for chunk in chunks for module in chunk.modules())
    return sorted(
        {
            base.__module__.split(".")[0]
            for module in modules
            if next(module.parameters(recurse=False), None) is not None
            for base in type(module).__mro__
        }
        - {"builtins", "abc", "torch", "typing"}
    )


class AdamComparison:
    """Steps torch's AdamW beside the actor's optimizer, on copies of the float32 masters that this rank holds."""

    def __init__(self, actor: Any) -> None:
        import torch

        self._megatron = actor.optimizer.megatron
        self._inner = [part.optimizer for part in self._megatron.chained_optimizers if part.optimizer]
        self.classes = {f"{type(inner).__module__}.{type(inner).__name__}" for inner in self._inner}
        self.difference = 0.0
        self._groups = [group for inner in self._inner for group in inner.param_groups if group["params"]]
        self._copies = [[parameter.detach().clone() for parameter in group["params"]] for group in self._groups]
        self._torch = torch.optim.AdamW([{"params": copies} for copies in self._copies]) if self._copies else None

    def compare(self, step: Any) -> Any:
        """What `step` returns; both sides start from the same masters in every step, and keep their own moments."""
        if self._torch is None:
            return step()
        self._megatron.prepare_grads()
        for group, copies, beside in zip(self._groups, self._copies, self._torch.param_groups, strict=True):
            for parameter, copy in zip(group["params"], copies, strict=True):
                copy.copy_(parameter.detach())
                copy.grad = parameter.grad.detach().clone()
            for name in ("betas", "eps", "weight_decay"):
                beside[name] = group[name]
        result = step()
        for group, beside in zip(self._groups, self._torch.param_groups, strict=True):
            beside["lr"] = group["lr"]  # the schedule has set it at the beginning of the step
        self._torch.step()
        for group, copies in zip(self._groups, self._copies, strict=True):
            for parameter, copy in zip(group["params"], copies, strict=True):
                apart = (parameter.detach() - copy).abs().max() if copy.numel() else 0.0
                self.difference = max(self.difference, float(apart) / group["lr"])
        return result

"""The actor in every layout against plain PyTorch on the Hugging Face model: loss, gradients, weights after a step.

`run_parity` starts four ranks once, which then run case after case: importing Megatron takes longer than a case.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.distributed.launch import end_model_parallel, run_ranks
from tests.support.deadlines import scaled

LEARNING_RATE = 2e-4
ADAM_EPSILON = 1e-3
"""Large, so that an update is a smooth function of the gradient; at 1e-8 it is the sign of rounding errors."""
WORLD_SIZE = 4
LIMITS = {"loss": 1e-5, "gradients": 1e-5, "gradient_norm": 1e-5, "weights": 3e-7}
"""Float32 rounding over four layers (weights around 1 have steps of 1.2e-7); a wrong factor or a missing term is larger
by orders of magnitude."""
BUCKET_SIZE = 10_000
"""Parameters in a bucket of gradients: several buckets on each rank, as a large model has."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model in one layout; `settings` go over the configuration, section by section."""

    family: str = "qwen3_tied"
    parallel: dict[str, Any] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        """Such as "qwen3 TP2 PP2 | actor.minibatches 2"."""
        more = [f"parallel.{key} {value}" for key, value in self.parallel.items() if key not in _SHORT]
        for section, values in self.settings.items():
            named = values.items() if isinstance(values, dict) else [(None, values)]
            more += [f"{section}.{key} {value}" if key else f"{section} {value}" for key, value in named]
        return " | ".join([f"{self.family} {layout_title(self.parallel)}", *more])


def layout_title(parallel: dict[str, Any]) -> str:
    """Such as "TP2 DP2"."""
    sizes = {axis: parallel.get(axis, 1) for axis in _SHORT}
    data = WORLD_SIZE // (sizes["tensor"] * sizes["pipeline"] * sizes["context"])
    layout = " ".join(f"{_SHORT[axis]}{size}" for axis, size in sizes.items() if size > 1)
    return f"{layout} DP{data}".strip() if data > 1 else layout


_SHORT = {"tensor": "TP", "pipeline": "PP", "virtual_pipeline": "VPP", "context": "CP", "expert": "EP"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The largest absolute differences of a case over its steps."""

    loss: float
    gradients: float
    gradient_norm: float
    weights: float
    num_microbatches: int
    """of the last step, over the minibatches of one data-parallel rank"""


def run_parity(cases: list[Case], *, timeout_seconds: float = 280.0) -> list[Difference]:
    """One `Difference` per case, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        encoded = json.dumps([dataclasses.asdict(case) for case in cases])
        output = run_ranks(_run_cases, WORLD_SIZE, encoded, folder, timeout_seconds=timeout_seconds)
    return [Difference(**json.loads(line)) for line in output.splitlines() if line.startswith('{"loss"')]


def _run_cases(encoded: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from megatron_a3po import cpu
    from megatron_a3po.parallel.layout import RankInfo, init_distributed

    cpu.install()
    use_small_buckets()
    torch.set_num_threads(1)
    info = RankInfo.from_environment()
    init_distributed(info, "cpu", scaled(60.0))
    for case in [Case(**fields) for fields in json.loads(encoded)]:
        model_folder = Path(folder) / case.family
        if info.rank == 0 and not model_folder.exists():
            from tests.support.tiny_models import save_tiny_model

            save_tiny_model(case.family, model_folder)
        dist.barrier()
        if info.rank == 0:
            print(case.title, flush=True)
        difference = _compare(case, model_folder)
        if difference is not None:
            print(json.dumps(dataclasses.asdict(difference)), flush=True)
    dist.destroy_process_group()


def use_small_buckets() -> None:
    from megatron_a3po.actor import model

    original = model._ddp_config
    model._ddp_config = lambda config: dataclasses.replace(original(config), bucket_size=BUCKET_SIZE)


def configuration(case: Case, folder: Path) -> Any:
    from megatron_a3po.config import RunConfig

    settings: dict[str, Any] = {
        "model": folder,
        "run_dir": folder,
        "num_steps": 4,
        "device": "cpu",
        "precision": "fp32",
        "data": {"task": "spell_backward"},
        "parallel": dict(case.parallel),
        "optimizer": {"learning_rate": LEARNING_RATE, "adam_eps": ADAM_EPSILON},
        "algorithm": {"weight_cap": 2.0},
        "actor": {"microbatch_tokens": 128, "output_layer": "logits", "collective_timeout_seconds": 60},
    }
    for section, values in case.settings.items():
        settings[section] = settings.get(section, {}) | values if isinstance(values, dict) else values
    return RunConfig.model_validate(settings)


def _compare(case: Case, folder: Path) -> Difference | None:
    """On rank 0, which alone trains the plain model."""
    import torch
    import torch.distributed as dist

    from megatron_a3po.actor import build_actor
    from megatron_a3po.parallel.broadcast import broadcast_trajectories
    from megatron_a3po.runtime.timing import PhaseTimer
    from tests.distributed.plain_training import METRICS, PlainTrainer, checkpoint_tensors, random_batch
    from tests.support.tiny_models import VOCAB_SIZE

    config = configuration(case, folder)
    actor = build_actor(config, device=torch.device("cpu"), timer=PhaseTimer())
    _assert_built(actor, config)
    plain = PlainTrainer.from_folder(folder, config) if dist.get_rank() == 0 else None
    gradients: dict[str, torch.Tensor] = {}
    step = actor.optimizer.step

    def step_after_reading_gradients() -> Any:
        gradients.update(reduced_gradients(actor))
        return step()

    actor.optimizer.step = step_after_reading_gradients  # type: ignore[method-assign]
    actor.version = 3
    found: list[dict[str, float]] = []
    for number in range(2):
        batch = random_batch(number, actor.version, plain.model, vocab_size=VOCAB_SIZE) if plain else None
        trajectories = broadcast_trajectories(batch)
        advantages = torch.randn(len(trajectories), generator=torch.Generator().manual_seed(number))
        version = actor.version
        metrics = actor.train_step(trajectories, advantages)
        weights = exported(actor)
        if plain is not None:
            expected = plain.train_step(trajectories, advantages, version)
            assert metrics["clipped_share"] > 0 or config.proximal == "recompute", "the batch should reach the clipping"
            found.append(
                {
                    "loss": max(abs(metrics.get(name, 0.0) - expected[name]) for name in METRICS),
                    "gradients": _largest(gradients, checkpoint_tensors(plain.model, gradients=True)),
                    "gradient_norm": abs(metrics["gradient_norm"] - expected["gradient_norm"]),
                    "weights": _largest(weights, checkpoint_tensors(plain.model)),
                }
            )
    end_model_parallel()
    if not found:
        return None
    return Difference(
        **{name: max(values[name] for values in found) for name in found[0]},
        num_microbatches=metrics["num_microbatches"],
    )


def _assert_built(actor: Any, config: Any) -> None:
    """The numbers do not depend on the layout, so they cannot tell whether it was built."""
    from megatron.core.utils import get_model_config

    from megatron_a3po.preflight.memory import rank_parameters

    parallel, groups, model = config.parallel, actor.model.groups, get_model_config(actor.model.chunks[0])
    sizes = [group.size() for group in (groups.tp, groups.pp, groups.cp, groups.ep)]
    assert sizes == [parallel.tensor, parallel.pipeline, parallel.context, parallel.expert]
    assert len(actor.model.chunks) == parallel.virtual_pipeline
    assert model.sequence_parallel == (parallel.tensor > 1)
    assert (model.recompute_granularity or "none") == config.actor.activation_recompute
    built = sum(parameter.numel() for chunk in actor.model.chunks for parameter in chunk.parameters())
    assert built == rank_parameters(parallel, actor._architecture, groups.pp.rank()).total
    for chunk in actor.model.chunks:
        assert chunk.ddp_config.overlap_grad_reduce == parallel.overlap
        assert chunk.ddp_config.overlap_param_gather == (parallel.overlap and config.actor.minibatches > 1)
        assert len(chunk.bucket_groups) > 1 or not parallel.overlap or parallel.pipeline > 1


def _largest(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    # The router's bias is no parameter: it has no gradient, and no step changes it.
    names = [name for name in ours if not name.endswith("e_score_correction_bias")]
    return max(float((ours[name].float() - theirs[name]).abs().max()) for name in names)


def exported(actor: Any) -> dict[str, Any]:
    """The weights as they are published, on rank 0. Collective."""
    collector = getattr(actor, "_collector", None)
    if collector is None:
        import torch.distributed as dist

        from megatron_a3po.weights.gather import WeightCollector

        gloo_group = dist.new_group(backend="gloo")
        assert isinstance(gloo_group, dist.ProcessGroup)
        model, folder = actor.model, actor._config.model
        collector = WeightCollector(model.chunks, model.groups, folder, gloo_group, bucket_bytes=1 << 16)
        actor._collector = collector
    return dict(collector.tensors())


def reduced_gradients(actor: Any) -> dict[str, Any]:
    """Put the reduced gradients where the weights are, so that they are gathered and named like weights."""
    import torch.distributed as dist

    parameters = [parameter for chunk in actor.model.chunks for parameter in chunk.parameters()]
    for chunk in actor.model.chunks:
        for buckets in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group = buckets.intra_distributed_optimizer_instance_group
            for bucket in buckets.buckets:  # each rank has reduced its own shard only
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    kept = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradients = exported(actor)
    for parameter, data in zip(parameters, kept, strict=True):
        parameter.data.copy_(data)
    return gradients

"""Ranks that train, save, and go on from what they saved: the program behind test_checkpoint."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from tests.distributed.launch import end_model_parallel
from tests.distributed.parity import WORLD_SIZE, Case, configuration, exported, use_small_buckets
from tests.support.deadlines import scaled

STEPS_BEFORE, STEPS_AFTER = 2, 5


def main(encoded: str, folder: str, device: Literal["cpu", "cuda"]) -> None:
    """The first case saves after STEPS_BEFORE steps and goes on; the others go on from its checkpoint. Rank 0 prints
    what each of them saw in its STEPS_AFTER steps."""
    import torch
    import torch.distributed as dist

    from megatron_a3po.parallel.layout import RankInfo, init_distributed

    if device == "cpu":
        from megatron_a3po import cpu

        cpu.install()
        use_small_buckets()
    torch.set_num_threads(1)
    info = RankInfo.from_environment()
    init_distributed(info, device, scaled(60.0))
    for number, case in enumerate(Case(**fields) for fields in json.loads(encoded)):
        model = Path(folder) / case.family
        if info.rank == 0 and not model.exists():
            _save_model(case.family, model, device)
        dist.barrier()
        torch.manual_seed(number + info.rank)  # so that an equal random number afterwards was restored
        seen = _run(case, model, Path(folder), number)
        if info.rank == 0:
            print(json.dumps(seen), flush=True)
    dist.destroy_process_group()


def _save_model(family: str, folder: Path, device: Literal["cpu", "cuda"]) -> None:
    if device == "cpu":
        from tests.support.tiny_models import save_tiny_model

        save_tiny_model(family, folder)
    else:  # in shapes that its kernels take
        from tests.gpu.models import save_model

        save_model(family, folder)


def _run(case: Case, model: Path, folder: Path, number: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from megatron_a3po.actor import build_actor
    from megatron_a3po.checkpoint.manager import CheckpointManager
    from megatron_a3po.runtime.timing import PhaseTimer

    config = configuration(case, model).model_copy(update={"run_dir": folder / "run", "num_steps": 100})
    actor = build_actor(config, device=torch.device(config.device), timer=PhaseTimer())
    checkpoints = CheckpointManager(config, dist.group.WORLD, PhaseTimer())
    altered: list[str] = []
    if number == 0:
        for step in range(STEPS_BEFORE):
            _step(actor, step)
        checkpoints.save(STEPS_BEFORE, actor, _rollouts(actor.version))
    else:
        assert checkpoints.choose() == STEPS_BEFORE
        rollouts = checkpoints.load(actor)
        assert actor.version == STEPS_BEFORE and rollouts in (None, _rollouts(STEPS_BEFORE))
        random_state = torch.get_rng_state()
        altered = _altered_by_saving_again(actor, config.run_dir / "checkpoints", folder / f"again_{number}")
        torch.set_rng_state(random_state)
    random = torch.rand(()).item()
    metrics = [_step(actor, STEPS_BEFORE + step) for step in range(STEPS_AFTER)]
    weights = {
        name: [(tensor.double().flatten() @ direction(tensor)).item(), tensor.double().norm().item()]
        for name, tensor in exported(actor).items()
    }
    end_model_parallel()
    return {"metrics": metrics, "weights": weights, "random": random, "altered": altered}


def direction(tensor: Any) -> Any:
    """Fixed random numbers, one for each element: elements in another order, or signs, give another product."""
    import torch

    return torch.randn(tensor.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        tensor.device
    )


def _altered_by_saving_again(actor: Any, checkpoints: Path, folder: Path) -> list[str]:
    """Save what was loaded: the tensors (weights, masters, moments) that differ in a bit, on rank 0. Collective."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    save = actor.plan_save(folder)
    save.write()
    save.finish()
    if dist.get_rank() != 0:
        return []
    (loaded,) = checkpoints.glob("step_*")
    before, after = _tensors(loaded), _tensors(folder)
    assert len(before) >= 4 * 10, "weights, masters and both moments"
    altered = sorted(set(before) ^ set(after))
    for name in set(before) & set(after):
        rows = min(len(before[name]), len(after[name]))  # a layout pads the vocabulary
        if not before[name][:rows].equal(after[name][:rows]):
            altered.append(name)
    return altered


def _tensors(folder: Path) -> dict[str, Any]:
    """All tensors of a checkpoint, whole, read by torch alone."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata.items()
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _rollouts(version: int) -> Any:
    from megatron_a3po.rollout.state import RolloutState

    return RolloutState(
        version=version, next_batch=version, issued=8, consumed=7, dropped={}, buffered=(), in_flight=(7,)
    )


def _step(actor: Any, seed: int) -> dict[str, float]:
    """One step on a batch that depends on the seed only."""
    import torch

    from megatron_a3po.types import FinishReason, Trajectory

    generator = torch.Generator().manual_seed(seed)
    batch = []
    for number in range(32):
        prompt, response = torch.randint(3, 14, (2,), generator=generator).tolist()
        age = torch.randint(0, 2, (response,), generator=generator).clamp(max=actor.version)
        batch.append(
            Trajectory(
                prompt_id=str(number),
                group_id=number // 4,
                token_ids=torch.randint(1, 259, (prompt + response,), generator=generator),
                prompt_length=prompt,
                behaviour_logprobs=-5.5 + 0.5 * torch.randn(response, generator=generator),
                weight_versions=actor.version - age,
                reward=0.0,
                finish_reason=FinishReason.STOP,
            )
        )
    metrics = actor.train_step(batch, torch.randn(len(batch), generator=generator))
    return {name: metrics[name] for name in ("loss", "gradient_norm", "learning_rate", "entropy", "kl_k3")}


def run_cases(
    cases: list[Case],
    folder: Path,
    *,
    world_size: int = WORLD_SIZE,
    device: Literal["cpu", "cuda"] = "cpu",
    timeout_seconds: float = 280.0,
) -> list[dict[str, Any]]:
    from tests.distributed.launch import run_ranks

    output = run_ranks(
        main,
        world_size,
        encode(cases),
        str(folder),
        device,
        timeout_seconds=timeout_seconds,
        with_gpus=device == "cuda",
    )
    return decode(output)


def encode(cases: list[Case]) -> str:
    """For `main`."""
    return json.dumps([dataclasses.asdict(case) for case in cases])


def decode(output: str) -> list[dict[str, Any]]:
    """What `main` printed on rank 0."""
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"metrics"')]

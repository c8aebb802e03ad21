"""Ranks that train, save, and go on from what they saved: the program behind test_checkpoint."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.distributed.launch import end_model_parallel
from tests.distributed.parity import WORLD_SIZE, Case, configuration, exported

STEPS_BEFORE, STEPS_AFTER = 2, 5


def main(encoded: str, folder: str) -> None:
    """The first case saves after STEPS_BEFORE steps and goes on; the others go on from its checkpoint. Rank 0 prints
    what each of them saw in its STEPS_AFTER steps."""
    import torch
    import torch.distributed as dist

    from megatron_a3po import cpu
    from megatron_a3po.parallel.layout import RankInfo, init_distributed

    cpu.install()
    torch.set_num_threads(1)
    info = RankInfo.from_environment()
    init_distributed(info, "cpu", 60.0)
    for number, case in enumerate(Case(**fields) for fields in json.loads(encoded)):
        from tests.tiny_models import save_tiny_model

        model = Path(folder) / case.family
        if info.rank == 0 and not model.exists():
            save_tiny_model(case.family, model)
        dist.barrier()
        torch.manual_seed(number + info.rank)  # so that an equal random number afterwards was restored
        seen = _run(case, model, Path(folder), saves=number == 0)
        if info.rank == 0:
            print(json.dumps(seen), flush=True)
    dist.destroy_process_group()


def _run(case: Case, model: Path, folder: Path, *, saves: bool) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from megatron_a3po.actor import build_actor
    from megatron_a3po.actor.checkpoint import CheckpointManager
    from megatron_a3po.runtime.timing import PhaseTimer

    config = configuration(case, model).model_copy(update={"run_dir": folder / "run", "num_steps": 100})
    actor = build_actor(config, device=torch.device("cpu"), timer=PhaseTimer())
    checkpoints = CheckpointManager(config, dist.group.WORLD, PhaseTimer())
    if saves:
        for step in range(STEPS_BEFORE):
            _step(actor, step)
        checkpoints.save(STEPS_BEFORE, actor, _rollouts(actor.version))
    else:
        assert checkpoints.choose() == STEPS_BEFORE
        rollouts = checkpoints.load(actor)
        assert actor.version == STEPS_BEFORE and rollouts in (None, _rollouts(STEPS_BEFORE))
    random = torch.rand(()).item()
    metrics = [_step(actor, STEPS_BEFORE + step) for step in range(STEPS_AFTER)]
    weights = {name: tensor.double().sum().item() for name, tensor in exported(actor).items()}
    end_model_parallel()
    return {"metrics": metrics, "weights": weights, "random": random}


def _rollouts(version: int) -> Any:
    from megatron_a3po.data.rollout_state import RolloutState

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


def run_cases(cases: list[Case], folder: Path, *, timeout_seconds: float = 280.0) -> list[dict[str, Any]]:
    from tests.distributed.launch import run_ranks

    encoded = json.dumps([dataclasses.asdict(case) for case in cases])
    output = run_ranks(main, WORLD_SIZE, encoded, str(folder), timeout_seconds=timeout_seconds)
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"metrics"')]

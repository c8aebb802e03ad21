"""Checkpoints of Megatron's offloaded optimizer, which takes parameters in bf16 for those of a GPU here."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import checkpoint_cases
from tests.distributed.launch import end_model_parallel, run_ranks
from tests.distributed.parity import WORLD_SIZE, Case, configuration
from tests.support.deadlines import scaled

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

_SETTINGS: dict[str, Any] = {"precision": "bf16", "optimizer": {"offload": True, "learning_rate": 1e-3}}
DATA_PARALLEL = Case(parallel={}, settings=_SETTINGS)
PIPELINE = Case(parallel={"pipeline": 2}, settings=_SETTINGS)


def test_a_run_goes_on_from_its_checkpoint_in_any_layout(tmp_path: Path) -> None:
    encoded = checkpoint_cases.encode([DATA_PARALLEL, DATA_PARALLEL, PIPELINE])
    output = run_ranks(_run_cases, WORLD_SIZE, encoded, str(tmp_path), timeout_seconds=280)
    never_stopped, same_layout, other = checkpoint_cases.decode(output)

    assert same_layout == never_stopped
    assert other["altered"] == []


def test_before_the_first_step_it_is_saved_too_and_a_rank_keeps_its_share_of_what_it_loads_only(tmp_path: Path) -> None:
    output = run_ranks(_run_early, WORLD_SIZE, str(tmp_path), timeout_seconds=200)
    seen = json.loads(output.splitlines()[-1])

    assert seen["early_steps"] == [0.0] and seen["early_moments"] == 0.0
    assert seen["early_masters_are_the_weights"]
    assert seen["after"] == seen["never_stopped"]
    assert seen["kept_bytes"] == seen["needed_bytes"] > 0
    assert seen["gradient_bytes"] == seen["master_bytes"], "what the estimate of memory counts"


def _run_cases(encoded: str, folder: str) -> None:
    _take_bf16_for_a_gpus()
    checkpoint_cases.main(encoded, folder, "cpu")


def _take_bf16_for_a_gpus() -> None:
    """Offloading is of parameters on a GPU; with the CPU's modules none is there."""
    from megatron_a3po import cpu

    cpu.install()
    import torch
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    share = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def with_gpus(self: Any, fraction: float) -> Any:
        tensor: Any = torch.Tensor
        tensor.is_cuda = property(lambda tensor: tensor.dtype == torch.bfloat16)
        try:
            return share(self, fraction)
        finally:
            del tensor.is_cuda

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = with_gpus
    distrib_optimizer.HAVE_APEX_OR_TE = True  # as on a GPU, where the step is taken from the optimizers on the host


def _run_early(folder: str) -> None:
    """Save before any step, and go on from there in another actor."""
    import torch

    from megatron_a3po.parallel.layout import RankInfo, init_distributed

    _take_bf16_for_a_gpus()
    torch.set_num_threads(1)
    info = RankInfo.from_environment()
    init_distributed(info, "cpu", scaled(60.0))
    model, saved = Path(folder) / DATA_PARALLEL.family, Path(folder) / "saved"
    if info.rank == 0:
        from tests.support.tiny_models import save_tiny_model

        save_tiny_model(DATA_PARALLEL.family, model)
        saved.mkdir()
    torch.distributed.barrier()

    actor = _actor(model)
    save = actor.plan_save(saved)
    save.write()
    save.finish()
    are_weights = all(
        torch.equal(state["master_param"], weight.float())
        for hybrid in _hybrids(actor)
        for weight, state in hybrid.state.items()
    )
    never_stopped = checkpoint_cases._step(actor, 1)
    end_model_parallel()

    actor = _actor(model)
    actor.load(saved, same_layout=True)
    states = [state for hybrid in _hybrids(actor) for state in hybrid.state.values()]
    masters = [master for hybrid in _hybrids(actor) for master in hybrid.param_to_fp32_param.values()]
    held = [*masters, *(tensor for state in states for tensor in state.values())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    seen = {
        "early_masters_are_the_weights": are_weights,
        "early_steps": sorted({state["step"].item() for state in states}),
        "early_moments": max(state[name].abs().max().item() for state in states for name in ("exp_avg", "exp_avg_sq")),
        "kept_bytes": sum(storages.values()),
        "needed_bytes": sum(3 * master.nbytes + torch.tensor(0.0).nbytes for master in masters),
        "never_stopped": never_stopped,
        "after": checkpoint_cases._step(actor, 1),
        "master_bytes": sum(master.nbytes for master in masters),
    }
    seen["gradient_bytes"] = sum(
        held.nbytes for hybrid in _hybrids(actor) for held in hybrid.cpu_copy_map_grad.values()
    )
    if info.rank == 0:
        print(json.dumps(seen), flush=True)
    torch.distributed.destroy_process_group()


def _actor(model: Path) -> Any:
    import torch

    from megatron_a3po.actor import build_actor
    from megatron_a3po.runtime.timing import PhaseTimer

    return build_actor(configuration(DATA_PARALLEL, model), device=torch.device("cpu"), timer=PhaseTimer())


def _hybrids(actor: Any) -> list[Any]:
    return [part.optimizer for part in actor.optimizer.megatron.chained_optimizers]

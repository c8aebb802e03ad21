"""Ranks that convert a model, load it in several layouts, save it there, and convert it back: the program behind
test_conversion."""

import json
from pathlib import Path
from typing import Any

from tests.distributed.launch import end_model_parallel, run_ranks
from tests.tiny_models import FAMILIES

_ONE_RANK = (1, 1)
"""Tensor- and pipeline-parallel sizes of a conversion, whatever the number of processes."""
_DENSE = [{}, {"pipeline": 2}, {"pipeline": 4}, {"tensor": 2}, {"tensor": 2, "pipeline": 2}, {"tensor": 4}]
_VIRTUAL = {"pipeline": 2, "virtual_pipeline": 2}
_EXPERTS = [{"expert": 2}, {"tensor": 2, "expert": 4}]
_WITH_EXPERTS = ("qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss")
ALL: dict[str, list[dict[str, int]]] = {
    family: [*_DENSE, _VIRTUAL, *(_EXPERTS if family in _WITH_EXPERTS else [])] for family in FAMILIES
}
_TP2_PP2 = {"tensor": 2, "pipeline": 2}
REPRESENTATIVE: dict[str, list[dict[str, int]]] = {
    "qwen3_tied": [{"pipeline": 4}, {"tensor": 4}, _VIRTUAL],
    "qwen2": [_TP2_PP2],
    "qwen3_mqa": [{"tensor": 4}, _TP2_PP2],
    "qwen3_moe": [{"tensor": 2, "expert": 4}, _VIRTUAL],
    "deepseek_v3": [_TP2_PP2],
    "gpt_oss": [{"tensor": 2, "expert": 4}],
}


def run_conversions(layouts: dict[str, list[dict[str, int]]], folder: Path, *, timeout_seconds: float) -> list[Any]:
    """For each family and layout {"family", "layout", "different": names of tensors}."""
    output = run_ranks(main, 4, json.dumps(layouts), str(folder), timeout_seconds=timeout_seconds)
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"family"')]


def main(encoded: str, folder: str) -> None:
    """`encoded`: layouts by family. On rank 0 prints for each the names of the tensors whose bits did not come back."""
    from megatron_a3po.conversion.processes import Processes, start_processes

    started = start_processes()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_a3po.conversion.to_megatron import convert_to_megatron
    from tests.tiny_models import save_tiny_model

    torch.set_num_threads(1)
    assert dist.group.WORLD is not None
    processes = Processes(rank=started.rank, world_size=started.world_size, group=dist.group.WORLD)
    end_model_parallel()
    for family, layouts in json.loads(encoded).items():
        root = Path(folder) / family
        processes.on_rank_zero(lambda family=family, root=root: save_tiny_model(family, root / "hf"))
        parallel_state.initialize_model_parallel(*_ONE_RANK, create_gloo_process_groups=False)
        convert_to_megatron(root / "hf", root / "megatron", processes)
        end_model_parallel()
        for number, layout in enumerate(layouts):
            run_dir, back = root / f"run{number}", root / f"back{number}"
            _load_and_save(root / "megatron", layout, run_dir, processes)
            _convert_back(run_dir, back, processes)
            if processes.rank == 0:
                found = {"family": family, "layout": layout, "different": differing_tensors(root / "hf", back)}
                print(json.dumps(found), flush=True)


def _load_and_save(model: Path, layout: dict[str, Any], run_dir: Path, processes: Any) -> None:
    """As a run does that starts from Megatron's weights."""
    import torch

    from megatron_a3po.actor import build_actor
    from megatron_a3po.actor.checkpoint import CheckpointManager
    from megatron_a3po.data.rollout_state import RolloutState
    from megatron_a3po.runtime.timing import PhaseTimer
    from tests.distributed.parity import Case, configuration

    config = configuration(Case(parallel=layout), model).model_copy(update={"run_dir": run_dir})
    actor = build_actor(config, device=torch.device("cpu"), timer=PhaseTimer())
    rollouts = RolloutState(version=0, next_batch=0, issued=0, consumed=0, dropped={}, buffered=(), in_flight=())
    CheckpointManager(config, processes.group, PhaseTimer()).save(1, actor, rollouts)
    end_model_parallel()


def _convert_back(run_dir: Path, target: Path, processes: Any) -> None:
    from megatron.core import parallel_state

    from megatron_a3po.conversion.to_hf import convert_to_hf, find_source

    parallel_state.initialize_model_parallel(*_ONE_RANK, create_gloo_process_groups=False)
    convert_to_hf(find_source(run_dir / "checkpoints" / "step_00000001", None), target, processes, fp8=False)
    end_model_parallel()


def differing_tensors(expected: Path, found: Path) -> list[str]:
    """Names that are in one folder only, or whose bits differ, as the safetensors library reads them."""
    import torch
    from safetensors.torch import load_file

    ours, theirs = load_file(found / "model.safetensors"), load_file(expected / "model.safetensors")
    return sorted(ours.keys() ^ theirs.keys()) + [
        name
        for name in ours.keys() & theirs.keys()
        if ours[name].dtype != theirs[name].dtype
        or not torch.equal(ours[name].view(torch.int32), theirs[name].view(torch.int32))
    ]

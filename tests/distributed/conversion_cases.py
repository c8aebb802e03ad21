"""Ranks that convert a model, load it in several layouts, save it there, and convert it back: the program behind
test_conversion."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from tests.distributed.launch import end_model_parallel, run_ranks
from tests.support.tiny_models import FAMILIES

_ONE_RANK = (1, 1)
"""Tensor- and pipeline-parallel sizes of a conversion, whatever the number of processes."""
_DENSE = [{}, {"pipeline": 2}, {"pipeline": 4}, {"tensor": 2}, {"tensor": 2, "pipeline": 2}, {"tensor": 4}]
_VIRTUAL = {"pipeline": 2, "virtual_pipeline": 2}
_EXPERTS = [{"expert": 2}, {"tensor": 2, "expert": 4}]
_WITH_EXPERTS = ("qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss")
ALL: dict[str, list[dict[str, int]]] = {
    family: [*_DENSE, _VIRTUAL, *(_EXPERTS if family in _WITH_EXPERTS else [])] for family in FAMILIES
}
_MANY_RANKS = [{"tensor": 2, "pipeline": 4}, {"tensor": 4, "pipeline": 2}, {"tensor": 4, "pipeline": 4}]
ALL_ON_MANY_RANKS: dict[str, list[dict[str, int]]] = {family: _MANY_RANKS for family in FAMILIES}
_TP2_PP2 = {"tensor": 2, "pipeline": 2}
REPRESENTATIVE: dict[str, list[dict[str, int]]] = {
    "qwen3_tied": [{"pipeline": 4}, _VIRTUAL],
    "qwen2": [_TP2_PP2],
    "qwen3_mqa": [{"tensor": 4}],
    "qwen3_moe": [{"tensor": 2, "expert": 4}],
    "deepseek_v3": [_TP2_PP2],
    "gpt_oss": [{"tensor": 2, "expert": 4}],
}
REPRESENTATIVE_ON_MANY_RANKS = {family: _MANY_RANKS[2:] for family in ("qwen3_tied", "glm4_moe", "gpt_oss")}


def run_conversions(layouts: dict[str, list[dict[str, int]]], folder: Path, *, timeout_seconds: float) -> list[Any]:
    """For each family and layout {"family", "layout", "different": names of tensors}."""
    return _found(run_ranks(main, 4, json.dumps(layouts), str(folder), timeout_seconds=timeout_seconds))


def run_conversions_in_turn(
    layouts: dict[str, list[dict[str, int]]], folder: Path, *, timeout_seconds: float
) -> list[Any]:
    """The same for layouts of more ranks than this machine holds."""
    return _found(run_ranks(ranks_in_turn, 1, json.dumps(layouts), str(folder), timeout_seconds=timeout_seconds))


def _found(output: str) -> list[Any]:
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"family"')]


def main(encoded: str, folder: str) -> None:
    """`encoded`: layouts by family. On rank 0 prints for each the names of the tensors whose bits did not come back."""
    from megatron_a3po.conversion.processes import Processes, start_processes

    started = start_processes()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_a3po.conversion.to_megatron import convert_to_megatron
    from tests.support.tiny_models import save_tiny_model

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


def ranks_in_turn(encoded: str, folder: str) -> None:
    """As `main`, in one process that is each rank of a layout in turn."""
    del os.environ["MASTER_ADDR"]  # there is nobody to meet, however often the process groups are made
    from megatron_a3po.conversion.processes import start_processes
    from tests.support.tiny_models import save_tiny_model

    processes = start_processes()
    from megatron.core.dist_checkpointing.validation import validate_sharding_integrity

    from megatron_a3po.conversion.to_hf import convert_to_hf, find_source
    from megatron_a3po.conversion.to_megatron import convert_to_megatron

    for family, layouts in json.loads(encoded).items():
        hf, megatron = Path(folder) / family / "hf", Path(folder) / family / "megatron"
        save_tiny_model(family, hf)
        convert_to_megatron(hf, megatron, processes)
        for number, layout in enumerate(layouts):
            saved, back = hf.with_name(f"saved{number}"), hf.with_name(f"back{number}")
            _end_groups()
            held = _load_and_save_in_turn(megatron, layout, saved)
            processes = start_processes()
            validate_sharding_integrity(held)
            convert_to_hf(find_source(saved, hf), back, processes, fp8=False)
            found = {"family": family, "layout": layout, "different": differing_tensors(hf, back)}
            print(json.dumps(found), flush=True)


def _load_and_save_in_turn(model: Path, layout: dict[str, int], folder: Path) -> list[list[Any]]:
    """Each rank builds its part of the model and loads it as a run does, and writes what is its own to write.

    Its groups have all ranks by number, and none that answers: no collective moves anything. Returns Megatron's
    descriptions (ShardedTensor) of what each rank holds.
    """
    from unittest.mock import patch

    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import is_main_replica
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_a3po.actor.fusions import detect_fusions
    from megatron_a3po.actor.model import build_model
    from megatron_a3po.conversion.torch_dist import finish_checkpoint, write_pieces
    from megatron_a3po.runtime.manifest import describe, write_manifest
    from tests.distributed.parity import Case, configuration

    folder.mkdir()
    config = configuration(Case(parallel=layout), model)
    world_size = layout["tensor"] * layout["pipeline"]
    held, pieces = [], []
    # Megatron would ask the other ranks whether all together read everything once.
    load = partial(dist_checkpointing.load, validate_access_integrity=False)
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        with patch.object(dist_checkpointing, "load", load):
            shards = _shards(build_model(config, detect_fusions()))
        held.append([shard.without_data() for shard in shards])
        mine = [_with_all_axes(shard) for shard in shards if is_main_replica(shard.replica_id)]
        pieces += write_pieces(folder / f"__{rank}_0.distcp", mine)
        _end_groups()
    finish_checkpoint(folder, pieces)
    write_manifest(folder, 0, describe(folder), {"content": "weights"})
    return held


def _shards(built: Any) -> list[Any]:
    """Megatron's ShardedTensors of a model with one chunk, with their values."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    [chunk] = built.chunks
    sharded = chunk.module.sharded_state_dict(
        metadata={"singleton_local_shards": False, "dp_cp_group": built.groups.dp_cp}
    )
    apply_factories(sharded)
    return [entry for entry in nested_values(sharded) if isinstance(entry, ShardedTensor)]


def _with_all_axes(shard: Any) -> Any:
    from dataclasses import replace

    shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return replace(shard, data=shard.data.detach().view(shape), local_shape=shape, prepend_axis_num=0)


def _end_groups() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _load_and_save(model: Path, layout: dict[str, Any], run_dir: Path, processes: Any) -> None:
    """As a run does that starts from Megatron's weights."""
    import torch

    from megatron_a3po.actor import build_actor
    from megatron_a3po.checkpoint.manager import CheckpointManager
    from megatron_a3po.rollout.state import RolloutState
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

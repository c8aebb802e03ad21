"""The policy's trained state in Megatron's torch_dist format: saved by all ranks, loaded into any parallel layout.

Weights, float32 masters and moments are stored as whole tensors by name; Megatron cuts them for the ranks that load
them. Random states are those of one rank each, and come back only into the layout that they were saved from.
"""

import dataclasses
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_a3po.actor.model import PolicyModel
from megatron_a3po.actor.optimizer import PolicyOptimizer

_SHARDING = "fully_reshardable"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """What is not a tensor: small, and the same on every rank."""

    version: int
    schedule_steps: int
    """where the learning-rate schedule stands, skipped steps included"""
    adam_steps: int
    skipped_in_a_row: int


def save_training_state(folder: Path, model: PolicyModel, optimizer: PolicyOptimizer, version: int) -> None:
    """Write into an empty folder that all ranks see. Collective."""
    state = TrainingState(
        version=version,
        schedule_steps=optimizer.schedule.num_steps,
        adam_steps=_adam_steps(optimizer),
        skipped_in_a_row=optimizer.skipped_in_a_row,
    )
    sharded = _sharded_state(model, optimizer, is_loading=False)
    sharded |= {"training": dataclasses.asdict(state), "rng": _rng_state()}
    # A queue is enough where this very process writes. Megatron would start a process for it, which outlives a kill.
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    # The replicas of a parameter share the writing of it.
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), model.groups.dp_cp)
    dist_checkpointing.save(sharded, str(folder), strategy)


def load_training_state(folder: Path, model: PolicyModel, optimizer: PolicyOptimizer, *, same_layout: bool) -> int:
    """Put what `save_training_state` wrote into the model and the optimizer; returns the version. Collective.

    `same_layout`: whether this is the parallel layout that the folder was saved from.
    """
    _fill_empty_states(optimizer)
    sharded = _sharded_state(model, optimizer, is_loading=True)
    if same_layout:
        sharded["rng"] = _rng_state()
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), model.groups.dp_cp)
    loaded = dist_checkpointing.load(sharded, str(folder), strategy)
    for name, chunk in _named_chunks(model):
        chunk.load_state_dict(loaded[name])
    state = TrainingState(**loaded["training"])
    _load_optimizer(optimizer, loaded["optimizer"], state.adam_steps)
    if same_layout:
        _set_rng_state(loaded["rng"])
    # The schedule's shape is the configuration's, whose num_steps may have grown; only where it stands is restored.
    optimizer.schedule.num_steps = 0
    optimizer.schedule.step(state.schedule_steps)
    optimizer.skipped_in_a_row = state.skipped_in_a_row
    return state.version


def _named_chunks(model: PolicyModel) -> Iterator[tuple[str, Any]]:
    """Megatron's names of the entries: the optimizer looks for "model0", "model1" where there are several chunks."""
    several = len(model.chunks) > 1
    for number, chunk in enumerate(model.chunks):
        yield f"model{number}" if several else "model", chunk.module


def _sharded_state(model: PolicyModel, optimizer: PolicyOptimizer, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": _SHARDING,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": model.groups.dp_cp,
    }
    sharded = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(model)}
    of_model = sharded if len(model.chunks) > 1 else sharded["model"]
    state = optimizer.megatron.sharded_state_dict(of_model, is_loading=is_loading, metadata=metadata)
    parts = [state] if len(optimizer.megatron.chained_optimizers) == 1 else [state[key] for key in sorted(state)]
    # Masters and moments, by the parameters' names. Not the parameter groups, which are the configuration's: where
    # experts have an optimizer of their own, they would fit no layout in which they have none.
    return sharded | {"optimizer": {str(number): part["param_state"] for number, part in enumerate(parts)}}


def _adam_steps(optimizer: PolicyOptimizer) -> int:
    _fill_empty_states(optimizer)
    groups = [group for part in _parts(optimizer) for group in part.state_dict()["optimizer"]["param_groups"]]
    return max(int(group.get("step") or 0) for group in groups)


def _load_optimizer(optimizer: PolicyOptimizer, loaded: dict[str, Any], adam_steps: int) -> None:
    for number, part in enumerate(_parts(optimizer)):
        own = part.state_dict()
        for group in own["optimizer"]["param_groups"]:
            group["step"] = adam_steps
        part.load_state_dict(own | {"param_state": loaded[str(number)], "param_state_sharding_type": _SHARDING})
    _separate_steps(optimizer)


def _parts(optimizer: PolicyOptimizer) -> list[Any]:
    """Megatron's distributed optimizers: one, or a second one for experts."""
    return list(optimizer.megatron.chained_optimizers)


def _torch_optimizers(optimizer: PolicyOptimizer) -> Iterator[tuple[Any, torch.optim.AdamW]]:
    """(Megatron's distributed optimizer, torch's AdamW inside): none where Transformer Engine or apex has the Adam."""
    for distributed in _parts(optimizer):
        if isinstance(distributed.optimizer, torch.optim.AdamW):
            yield distributed, distributed.optimizer


def _fill_empty_states(optimizer: PolicyOptimizer) -> None:
    """Give torch's AdamW the state that it makes at its first step: Megatron saves and loads only one that exists."""
    for distributed, adam in _torch_optimizers(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    adam.state[parameter] = {"step": torch.tensor(0.0), **moments}
        # Megatron takes the step from the parameter groups, and then looks for it among the loaded tensors.
        original = type(distributed)._set_main_param_and_optimizer_states.__get__(distributed)
        distributed._set_main_param_and_optimizer_states = _without_step(original)


def _without_step(original: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    return lambda parameter, tensors: original(parameter, {"step": None, **tensors})


def _separate_steps(optimizer: PolicyOptimizer) -> None:
    """Megatron loads one step tensor for all parameters, which each of them would then count up."""
    for _, adam in _torch_optimizers(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()


def _rng_state() -> ShardedObject:
    states = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))


def _set_rng_state(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])

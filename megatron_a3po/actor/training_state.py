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
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
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


class TrainingStateSave:
    """A save that all ranks have planned: this rank's files are still to be written. One at a time."""

    METADATA_FILES = (".metadata", "metadata.json")
    """What `finish` writes, on rank 0."""

    def __init__(self, request: AsyncRequest) -> None:
        self._finalize = request.finalize_fns
        self._buckets: list[Any] = []
        if request.async_fn is not None:  # otherwise other ranks write all that this one has
            self._transforms = request.async_fn.args[0]
            _, self._buckets, self._results = request.async_fn_args

    @property
    def file_names(self) -> list[str]:
        """Of this rank, relative to the folder."""
        return [Path(path).name for path, _, _ in self._buckets]

    def copy_to_host(self) -> None:
        """Take the state as it is now: afterwards training may change it while `write` is under way."""
        for _, _, (_, tensors) in self._buckets:
            for number, (item, tensor) in enumerate(tensors):
                # Also where it is in host memory already: of that, Megatron's plan has copied views only. One by one,
                # so that what the plan has copied goes meanwhile.
                tensors[number] = item, tensor.to("cpu", copy=True)

    def write(self) -> None:
        """Write this rank's files. No collective, so it may be done in another thread. Raises OSError."""
        results = {}
        for number, (path, name, (data, tensors)) in enumerate(self._buckets):
            # Megatron's plan leaves tensors on their GPU. They come to the host one by one, each when it is written.
            on_host = ((item, tensor.cpu()) for item, tensor in tensors)
            _, result = filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                self._transforms, number, (path, name, (data, on_host)), None, None, use_fsync=True
            )
            if isinstance(result, Exception):
                raise result if isinstance(result, OSError) else OSError(str(result) or repr(result)) from result
            results[number] = result
        if results:
            self._results.put(results)

    def finish(self) -> None:
        """Write what tells where everything is, once all ranks have written. Collective."""
        for finalize in self._finalize:
            finalize()


def plan_save(folder: Path, model: PolicyModel, optimizer: PolicyOptimizer, version: int) -> TrainingStateSave:
    """Divide the writing among the ranks, into an empty folder that all of them see. Collective."""
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
    # Megatron's own asynchronous writing takes processes and copies nothing that is in host memory; its plan is used.
    request = dist_checkpointing.save(sharded, str(folder), strategy, async_sharded_save=True, async_strategy="mcore")
    return TrainingStateSave(request)


def load_training_state(folder: Path, model: PolicyModel, optimizer: PolicyOptimizer, *, same_layout: bool) -> int:
    """Put what a `TrainingStateSave` wrote into the model and the optimizer; returns the version. Collective.

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
    for part in _parts(optimizer):
        original = type(part).get_parameter_state_dp_zero.__get__(part)
        part.get_parameter_state_dp_zero = _with_gaps(original, part.buffers)
    state = optimizer.megatron.sharded_state_dict(of_model, is_loading=is_loading, metadata=metadata)
    parts = [state] if len(optimizer.megatron.chained_optimizers) == 1 else [state[key] for key in sorted(state)]
    # Masters and moments, by the parameters' names. Not the parameter groups, which are the configuration's: where
    # experts have an optimizer of their own, they would fit no layout in which they have none.
    return sharded | {"optimizer": {str(number): part["param_state"] for number, part in enumerate(parts)}}


def _with_gaps(original: Callable[..., Any], buffers: list[Any]) -> Callable[..., Any]:
    """Megatron gathers buckets without the padding between them, and then looks for parameters where they are with it.

    Behind a padded bucket it would save other parameters' values, or zeros, under a parameter's name.
    """

    def gather(**arguments: Any) -> Any:
        gathered = original(**arguments)
        for number, buffer in enumerate(buffers):
            for tensors in gathered[number].values():
                for key in tensors.keys() - {"numel_unpadded"}:
                    tensors[key] = _spread(tensors[key], buffer)
        return gathered

    return gather


def _spread(unpadded: torch.Tensor, buffer: Any) -> torch.Tensor:
    """[numel_unpadded] to [numel]: each bucket to its place in the buffer."""
    sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
    starts = [bucket.offset for bucket in buffer.buckets]
    if starts == [sum(sizes[:number]) for number in range(len(sizes))]:
        return unpadded
    spread = unpadded.new_zeros(buffer.numel)
    for start, values in zip(starts, unpadded.split(sizes), strict=True):
        spread[start : start + len(values)] = values
    return spread


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
    for hybrid in _offloaded(optimizer):
        _keep_own_share(hybrid)


def _parts(optimizer: PolicyOptimizer) -> list[Any]:
    """Megatron's distributed optimizers: one, or a second one for experts."""
    return list(optimizer.megatron.chained_optimizers)


def _torch_optimizers(optimizer: PolicyOptimizer) -> Iterator[tuple[Any, torch.optim.AdamW]]:
    """(Megatron's distributed optimizer, torch's AdamW inside): none where Transformer Engine or apex has the Adam."""
    for distributed in _parts(optimizer):
        if isinstance(distributed.optimizer, torch.optim.AdamW):
            yield distributed, distributed.optimizer


def _offloaded(optimizer: PolicyOptimizer) -> Iterator[Any]:
    """Megatron's optimizers on the host: each has one of torch's AdamW for every parameter."""
    for distributed in _parts(optimizer):
        if isinstance(distributed.optimizer, HybridDeviceOptimizer):
            yield distributed.optimizer


def _fill_empty_states(optimizer: PolicyOptimizer) -> None:
    """Give an Adam the state that it makes at its first step: Megatron saves and loads only one that exists."""
    for distributed in _parts(optimizer):
        # Of the fused ones. The one on the host has no such function, and could only make a step of noise.
        if not isinstance(distributed.optimizer, torch.optim.AdamW) and distributed.init_state_fn is not None:
            distributed.init_state_fn(distributed.optimizer, distributed.config)
    for hybrid in _offloaded(optimizer):
        for adam in hybrid.sub_optimizers:
            _fill_empty_state(adam)
        hybrid._sync_sub_optimizers_state_to_hdo()
    for distributed, adam in _torch_optimizers(optimizer):
        _fill_empty_state(adam)
        # Megatron takes the step from the parameter groups, and then looks for it among the loaded tensors.
        original = type(distributed)._set_main_param_and_optimizer_states.__get__(distributed)
        distributed._set_main_param_and_optimizer_states = _without_step(original)


def _fill_empty_state(adam: torch.optim.Optimizer) -> None:
    for group in adam.param_groups:
        for parameter in group["params"]:
            if not adam.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.tensor(0.0), **moments}


def _without_step(original: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    return lambda parameter, tensors: original(parameter, {"step": None, **tensors})


def _separate_steps(optimizer: PolicyOptimizer) -> None:
    """Megatron loads one step tensor for all parameters, which each of them would then count up."""
    for _, adam in _torch_optimizers(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()


def _keep_own_share(hybrid: HybridDeviceOptimizer) -> None:
    """Megatron leaves in it views of whole tensors, which every rank of a data-parallel group would go on holding."""
    for state in hybrid.state.values():
        state |= {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
    hybrid._sync_sub_optimizers_state_to_hdo()  # The masters are copied into parameters, which are kept.


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

"""The policy's trained state in Megatron's torch_dist format: saved by all ranks, loaded into any parallel layout.

Weights, float32 masters and moments are stored as whole tensors by name; Megatron cuts them for the ranks that load
them. Random states are those of one rank each, and come back only into the layout that they were saved from.
"""

import dataclasses
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
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
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_a3po.actor.model import PolicyModel
from megatron_a3po.actor.optimizer import PolicyOptimizer
from megatron_a3po.actor.optimizer_state import (
    SHARDING,
    adam_steps,
    fill_empty_states,
    load_optimizer_state,
    sharded_optimizer_state,
)

_ALLOW_PICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


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
        adam_steps=adam_steps(optimizer),
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
    fill_empty_states(optimizer)
    sharded = _sharded_state(model, optimizer, is_loading=True)
    if same_layout:
        sharded["rng"] = _rng_state()
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), model.groups.dp_cp)
    loaded = dist_checkpointing.load(sharded, str(folder), strategy)
    with _pickled_extra_state():
        for name, chunk in _named_chunks(model):
            chunk.load_state_dict(loaded[name])
    state = TrainingState(**loaded["training"])
    load_optimizer_state(optimizer, loaded["optimizer"], state.adam_steps)
    if same_layout:
        _set_rng_state(loaded["rng"])
    # The schedule's shape is the configuration's, whose num_steps may have grown; only where it stands is restored.
    optimizer.schedule.num_steps = 0
    optimizer.schedule.step(state.schedule_steps)
    optimizer.skipped_in_a_row = state.skipped_in_a_row
    return state.version


@contextmanager
def _pickled_extra_state() -> Iterator[None]:
    """Transformer Engine keeps the scales of delayed scaling as a pickle, and by default refuses to load one.

    What is loaded is a run's own: its manifest has checked every byte.
    """
    before = os.environ.get(_ALLOW_PICKLE)
    os.environ[_ALLOW_PICKLE] = "1"
    try:
        yield
    finally:
        del os.environ[_ALLOW_PICKLE]
        if before is not None:
            os.environ[_ALLOW_PICKLE] = before


def _named_chunks(model: PolicyModel) -> Iterator[tuple[str, Any]]:
    """Megatron's names of the entries: the optimizer looks for "model0", "model1" where there are several chunks."""
    several = len(model.chunks) > 1
    for number, chunk in enumerate(model.chunks):
        yield f"model{number}" if several else "model", chunk.module


def _sharded_state(model: PolicyModel, optimizer: PolicyOptimizer, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": SHARDING,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": model.groups.dp_cp,
    }
    sharded = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(model)}
    of_model = sharded if len(model.chunks) > 1 else sharded["model"]
    return sharded | {"optimizer": sharded_optimizer_state(optimizer, of_model, metadata, is_loading=is_loading)}


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

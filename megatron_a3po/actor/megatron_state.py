"""Save and load the training state in Megatron's torch_dist format: written by all ranks, read in any parallel layout.

Weights, float32 masters and moments are stored as whole tensors by name, which Megatron cuts for the ranks that load
them. Each rank has random states of its own. They are restored only in the layout that they were saved from.
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
    """The part of the state that is not tensors. It is small, and equal on every rank."""

    version: int
    schedule_steps: int
    """steps of the learning-rate schedule, including skipped ones"""
    adam_steps: int
    skipped_in_a_row: int


class TrainingStateSave:
    """A planned save, of which this rank has to write its files. Only one may be under way."""

    METADATA_FILES = (".metadata", "metadata.json")
    """The files that `finish` writes on rank 0"""

    def __init__(self, request: AsyncRequest) -> None:
        self._finalize = request.finalize_fns
        self._buckets: list[Any] = []
        if request.async_fn is not None:  # None if other ranks write all that this one has
            self._transforms = request.async_fn.args[0]
            _, self._buckets, self._results = request.async_fn_args

    @property
    def file_names(self) -> list[str]:
        """The files of this rank, relative to the folder."""
        return [Path(path).name for path, _, _ in self._buckets]

    def copy_to_host(self) -> None:
        """Copy the state as it is now, so that training may go on while `write` is under way."""
        for _, _, (_, tensors) in self._buckets:
            for number, (item, tensor) in enumerate(tensors):
                # Copy tensors in host memory too: Megatron's plan has copied only views of them. Copy one by one, so
                # that the plan's own copies are freed meanwhile.
                tensors[number] = item, tensor.to("cpu", copy=True)

    def write(self) -> None:
        """Write this rank's files. Not collective, so another thread may do it. Raises OSError."""
        results = {}
        for number, (path, name, (data, tensors)) in enumerate(self._buckets):
            # Megatron's plan leaves tensors on the GPU. Copy each to the host only when it is written.
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
        """Write the metadata, after all ranks have written their files. Collective."""
        for finalize in self._finalize:
            finalize()


def plan_save(folder: Path, model: PolicyModel, optimizer: PolicyOptimizer, version: int) -> TrainingStateSave:
    """Divide the writing into an empty folder, which all ranks see, among the ranks. Collective."""
    state = TrainingState(
        version=version,
        schedule_steps=optimizer.schedule.num_steps,
        adam_steps=adam_steps(optimizer),
        skipped_in_a_row=optimizer.skipped_in_a_row,
    )
    sharded = _sharded_state(model, optimizer, is_loading=False)
    sharded |= {"training": dataclasses.asdict(state), "rng": _rng_state()}
    # This process writes, so a queue is enough. Megatron would start a process for it that outlives a kill.
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    # Ranks with replicas of a parameter share its writing.
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), model.groups.dp_cp)
    # Use only Megatron's plan: its asynchronous writer starts processes and does not copy what is in host memory.
    request = dist_checkpointing.save(sharded, str(folder), strategy, async_sharded_save=True, async_strategy="mcore")
    return TrainingStateSave(request)


def load_training_state(folder: Path, model: PolicyModel, optimizer: PolicyOptimizer, *, same_layout: bool) -> int:
    """Load the files of a `TrainingStateSave` into model and optimizer, and return the version. Collective.

    `same_layout`: whether this is the parallel layout that the folder was saved from. Only then random states are
    restored.
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
    # Restore only the schedule's position. Its shape is the configuration's, whose num_steps may have grown.
    optimizer.schedule.num_steps = 0
    optimizer.schedule.step(state.schedule_steps)
    optimizer.skipped_in_a_row = state.skipped_in_a_row
    return state.version


@contextmanager
def _pickled_extra_state() -> Iterator[None]:
    """Let Transformer Engine load the scales of delayed scaling inside the block: it keeps them as a pickle.

    By default it refuses pickles. This one is a run's own, and its manifest has checked every byte.
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
    """Yield chunks with Megatron's names: its optimizer expects "model", or "model0", "model1" for several chunks."""
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

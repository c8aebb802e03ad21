"""Load the weights that a run starts from, and keep them as the reference policy of a KL penalty."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoConfig

from megatron_a3po.config.model_folder import MEGATRON_WEIGHTS, has_megatron_weights
from megatron_a3po.errors import CheckpointError
from megatron_a3po.preflight.load import load_architecture
from megatron_a3po.runtime.manifest import check


def open_bridge(model: Path, dtype: torch.dtype) -> Any:
    """Open a Hugging Face folder, or one with Megatron's weights, by megatron-bridge."""
    if has_megatron_weights(model):
        return AutoBridge.from_hf_config(AutoConfig.from_pretrained(model))
    return AutoBridge.from_hf_pretrained(str(model), torch_dtype=dtype)


def load_start_weights(
    chunks: Sequence[torch.nn.Module], bridge: Any, groups: ProcessGroupCollection, model: Path
) -> None:
    """Load the folder `model` into this rank's chunks. Collective. Raises CheckpointError for damaged files."""
    if has_megatron_weights(model):
        _refuse_other_vocabulary(model)
        load_megatron_weights(chunks, groups, model / MEGATRON_WEIGHTS)
    else:
        bridge.load_hf_weights(list(chunks))
    forget_initial_values(parameter for chunk in chunks for parameter in chunk.parameters())


def forget_initial_values(parameters: Iterable[Any]) -> None:
    """Drop the initial values that Transformer Engine keeps of FP8 weights.

    Megatron would make the optimizer's masters of them, but nothing has written them: weights are loaded later.
    """
    for parameter in parameters:
        if hasattr(parameter, "get_high_precision_init_val"):
            parameter.clear_high_precision_init_val()
            del parameter.get_high_precision_init_val


def _refuse_other_vocabulary(model: Path) -> None:
    """Raise CheckpointError if embeddings and vocab_size differ: Megatron would leave the other rows empty."""
    entries: Any = FileSystemReader(model / MEGATRON_WEIGHTS).read_metadata().state_dict_metadata
    rows, expected = entries["embedding.word_embeddings.weight"].size[0], load_architecture(model).vocab_size
    if rows != expected:
        raise CheckpointError(
            f"{model}: its weights have {rows} embeddings, and config.json says vocab_size = {expected}; they are of "
            "two models"
        )


def load_megatron_weights(chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection, folder: Path) -> None:
    """Load a torch_dist checkpoint of any layout into chunks, in DDP or not. Collective.

    Raises CheckpointError if the files do not match their manifest or the model.
    """
    check(folder, dist.get_rank(), dist.get_world_size())
    metadata = {"singleton_local_shards": False, "dp_cp_group": groups.dp_cp}
    modules: list[Any] = [getattr(chunk, "module", chunk) for chunk in chunks]
    wanted = {
        str(number): {
            name: entry
            for name, entry in module.sharded_state_dict(metadata=metadata).items()
            # Transformer Engine's FP8 state belongs to a run of training, not to the weights.
            if not isinstance(entry, ShardedObject)
        }
        for number, module in enumerate(modules)
    }
    try:
        loaded = dist_checkpointing.load(wanted, str(folder))
    except (Exception, CheckpointException) as error:  # torch's own is not an Exception; a missing key is a KeyError
        raise CheckpointError(
            f"{folder}: cannot be loaded ({error}); is config.json of the same model? Else convert the model again"
        ) from error
    for number, module in enumerate(modules):
        missing = module.load_state_dict(loaded[str(number)], strict=False).missing_keys
        if any(not name.endswith("_extra_state") for name in missing):
            raise CheckpointError(f"{folder}: lacks {', '.join(missing)}; convert the model again")


class ReferenceWeights:
    """A copy of this rank's parameters in host memory, as they are now."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._kept = _to_host(self._parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with the reference inside the block, and give it back its own weights, bit for bit."""
        own = _to_host(self._parameters)
        _copy(self._kept, self._parameters)
        try:
            yield
        finally:
            _copy(own, self._parameters)


def _to_host(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in parameters]


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        # Copy into the storage: Megatron's parameters are views of buffers that the optimizer holds.
        target.data.copy_(source)

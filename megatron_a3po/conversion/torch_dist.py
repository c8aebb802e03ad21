"""Write and read Megatron's torch_dist checkpoints piece by piece.

The format is that of torch.distributed.checkpoint: files of consecutive saved tensors, and `.metadata`, which tells
where each piece of each key is. Megatron's own writer needs all tensors of a rank at once.
"""

import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, maybe_load_config, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from pydantic import BaseModel
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_a3po.errors import CheckpointError
from megatron_a3po.preflight.memory import VOCAB_MULTIPLE
from megatron_a3po.runtime.files import give_name, sync_folder, unfinished_path

_COMMON_FILE = "__common_0.distcp"


class Piece(BaseModel, frozen=True):
    """A part of a key's tensor, and where it was written."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    shape: tuple[int, ...]
    """of this piece, with as many axes as the whole"""
    file: str
    start: int
    num_bytes: int


def write_pieces(file: Path, tensors: Iterable[ShardedTensor]) -> list[Piece]:
    """Write one file of the checkpoint and return its pieces. Holds one tensor at a time. Raises CheckpointError."""
    pieces = []
    with unfinished_path(file).open("wb") as output:
        for tensor in tensors:
            start = output.tell()
            values = tensor.data.detach()
            # torch.save writes the whole storage of a view.
            alone = values.numel() * values.itemsize == values.untyped_storage().nbytes()
            try:
                torch.save(values.contiguous() if alone else values.clone(), output)
            except RuntimeError as error:  # torch's error for a full disk
                raise CheckpointError(f"{file}: could not be written; is the disk full? ({error})") from error
            pieces.append(
                Piece(
                    key=tensor.key,
                    dtype=str(values.dtype).removeprefix("torch."),
                    global_shape=tuple(tensor.global_shape),
                    global_offset=tuple(tensor.global_offset),
                    shape=tuple(values.shape),
                    file=file.name,
                    start=start,
                    num_bytes=output.tell() - start,
                )
            )
        output.flush()
        os.fsync(output.fileno())
    give_name(file)
    return pieces


def finish_checkpoint(folder: Path, pieces: Sequence[Piece]) -> None:
    """Write `.metadata` and `metadata.json`, which make the files a checkpoint. Raises CheckpointError."""
    described: dict[str, Any] = {}
    for piece in pieces:
        if piece.key not in described:
            described[piece.key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, piece.dtype)),
                size=torch.Size(piece.global_shape),
                chunks=[],
            )
        entry = described[piece.key]
        entry.chunks.append(ChunkStorageMetadata(torch.Size(piece.global_offset), torch.Size(piece.shape)))
    for key, entry in described.items():
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise CheckpointError(f"{folder}: the pieces of {key} do not make up its shape {tuple(entry.size)}")
    results = [
        WriteResult(
            index=MetadataIndex(piece.key, piece.global_offset),
            size_in_bytes=piece.num_bytes,
            storage_data=_StorageInfo(piece.file, piece.start, piece.num_bytes),
        )
        for piece in pieces
    ]
    results.append(_write_common(folder, described))
    FileSystemWriter(folder).finish(Metadata(state_dict_metadata=described), [results])
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    sync_folder(folder)


def _write_common(folder: Path, described: dict[str, Any]) -> WriteResult:
    """Write the entry for what Megatron keeps besides tensors: nothing, but it looks for the entry."""
    key = ShardedObject("common_state", None, (1,), (0,)).unique_key
    described[key] = BytesStorageMetadata()
    content = io.BytesIO()
    torch.save([{}], content)
    (folder / _COMMON_FILE).write_bytes(content.getvalue())
    num_bytes = len(content.getvalue())
    return WriteResult(
        index=MetadataIndex(key), size_in_bytes=num_bytes, storage_data=_StorageInfo(_COMMON_FILE, 0, num_bytes)
    )


def is_whole(folder: Path, pieces: Sequence[Piece]) -> bool:
    """Tell whether the file of these pieces has the size that was written."""
    try:
        return bool(pieces) and (folder / pieces[0].file).stat().st_size == pieces[-1].start + pieces[-1].num_bytes
    except OSError:
        return False


class TorchDistReader:
    """Reads whole parameters from a checkpoint of any layout."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata. Raises CheckpointError if the folder holds no torch_dist checkpoint."""
        config = maybe_load_config(str(folder)) if folder.is_dir() else None
        if config is None or config.sharded_backend != "torch_dist":
            raise CheckpointError(
                f"{folder}: no checkpoint of Megatron's torch_dist format (metadata.json is missing or names another); "
                "give the folder that holds the *.distcp files"
            )
        self._folder = folder
        try:
            entries = FileSystemReader(folder).read_metadata().state_dict_metadata
        except Exception as error:  # a damaged pickle raises anything
            raise CheckpointError(f"{folder}: .metadata cannot be read ({error}); copy the checkpoint again") from error
        self._entries = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self._strategy = TorchDistLoadShardedStrategy(cache_metadata=True)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a key. Raises CheckpointError if the checkpoint does not have it."""
        entry = self._entries.get(key)
        if entry is None:
            raise CheckpointError(f"{self._folder}: has no {key}; it is the checkpoint of another model")
        return entry.properties.dtype

    def read(self, tensors: Sequence[ShardedTensor]) -> None:
        """Fill the tensors' data. Raises CheckpointError for missing keys, wrong shapes and damaged files."""
        for tensor in tensors:
            self.dtype(tensor.key)
            self._refuse_other_shape(tensor)
        try:
            self._strategy.load({str(number): tensor for number, tensor in enumerate(tensors)}, self._folder)
        except (Exception, CheckpointException) as error:  # torch's own is no Exception; Megatron's, pickle's, zip's
            raise CheckpointError(f"{self._folder}: {tensors[0].key} cannot be read: {error}") from error

    def _refuse_other_shape(self, tensor: ShardedTensor) -> None:
        stored, wanted = tuple(self._entries[tensor.key].size), tuple(tensor.global_shape)
        # A layout pads the vocabulary; those rows are not read.
        padded = tensor.allow_shape_mismatch and stored[0] > wanted[0] and stored[0] % VOCAB_MULTIPLE == 0
        if stored != wanted and not (padded and stored[1:] == wanted[1:]):
            raise CheckpointError(
                f"{self._folder}: {tensor.key} is {list(stored)}, and config.json describes {list(wanted)}; they are "
                "of two models"
            )

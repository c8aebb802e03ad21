"""Divide the tensors of a Hugging Face folder among files."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_a3po.errors import CheckpointError
from megatron_a3po.hf.folder_checks import SINGLE
from megatron_a3po.hf.safetensors_format import TensorSpec

MAX_SHARD_BYTES = 5 * 10**9
"""As in folders that transformers writes"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """One safetensors file of the folder."""

    file_name: str
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensors."""
        return sum(spec.nbytes for spec in self.tensors)


def shard_name(number: int, of: int) -> str:
    """Return the name of a shard file; `number` counts from 1."""
    return SINGLE if of == 1 else f"model-{number:05d}-of-{of:05d}.safetensors"


def plan_shards(tensors: Iterable[TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES) -> tuple[ShardFile, ...]:
    """Divide the tensors, in the order given, among files of at most `max_shard_bytes`; a larger tensor has its own.

    Raises CheckpointError for no tensor, and for a name that comes twice.
    """
    groups: list[list[TensorSpec]] = []
    size, names = 0, set()
    for spec in tensors:
        if spec.name in names:
            raise CheckpointError(f"{spec.name} comes twice; every tensor belongs into a folder once")
        names.add(spec.name)
        if not groups or size + spec.nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    if not groups:
        raise CheckpointError("no tensor to write")
    return tuple(
        ShardFile(file_name=shard_name(number, len(groups)), tensors=tuple(group))
        for number, group in enumerate(groups, 1)
    )

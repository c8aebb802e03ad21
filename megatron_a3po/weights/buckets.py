"""Tensors that travel as one flat buffer. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.weights.shards import PlannedPart

_PIECES = 8
"""A bucket is collected in so many steps, so that what is under way takes little memory beside the buffer."""
_MIN_PIECE_BYTES = 1 << 20
"""Below, a step costs more than its memory is worth."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One flat buffer: the tensors' bytes, one after the other."""

    owner: int
    """the rank that fills and sends it"""
    tensors: tuple[TensorSpec, ...]
    """in the order of their bytes: by falling item size, so that each starts at a multiple of its own"""
    pieces: tuple[tuple[int, ...], ...]
    """numbers of the parts that are collected together"""
    number: int = 0
    """in the plan"""

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def title(self) -> str:
        more = f" and {len(self.tensors) - 1} more" if len(self.tensors) > 1 else ""
        return f"bucket {self.tensors[0].name}{more}"

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors inside of `buffer`, [nbytes] uint8, by name."""
        return dict(self._views(buffer))

    def _views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for tensor in self.tensors:
            yield tensor.name, buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            start += tensor.nbytes


def split_into_buckets(owner: int, parts: Iterable[PlannedPart], bucket_bytes: int) -> list[Bucket]:
    """Consecutive parts of together at most `bucket_bytes`; a larger part travels alone."""
    buckets = []
    for group in split_by_size(parts, bucket_bytes):
        tensors = sorted((tensor for part in group for tensor in part.tensors), key=lambda spec: -spec.dtype.itemsize)
        pieces = split_by_size(group, max(_MIN_PIECE_BYTES, bucket_bytes // _PIECES))
        buckets.append(
            Bucket(
                owner=owner,
                tensors=tuple(tensors),
                pieces=tuple(tuple(part.number for part in piece) for piece in pieces),
            )
        )
    return buckets


def split_by_size(parts: Iterable[PlannedPart], limit: int) -> list[Sequence[PlannedPart]]:
    groups: list[list[PlannedPart]] = []
    size = 0
    for part in parts:
        if not groups or size + part.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.nbytes
    return list(groups)

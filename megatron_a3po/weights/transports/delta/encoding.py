"""Find the words in which a buffer differs from a former one, and write them there. Pure.

A word is an element of the smallest item size in the buffer: a bf16 weight, or an FP8 one and a quarter of a scale.

counts   [ceil(words / 256)] int16   how many of each block of 256 words have changed
offsets  [changed] uint8             their positions in the block
values   [changed] integers          their new bits

Bits are compared, not numbers: 0.0 and -0.0 differ, and a NaN equals itself if its payload does.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_a3po.hf.safetensors_format import TensorSpec

_BLOCK = 256
_SLICE = 1 << 16
"""Blocks that are processed at a time: positions take 8 bytes each"""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What has changed in a buffer of words, in the order of the words."""

    counts: Tensor
    offsets: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the file, by name."""
        return {"counts": self.counts, "offsets": self.offsets, "values": self.values}


def as_words(buffer: Tensor, tensors: Iterable[TensorSpec]) -> Tensor:
    """Return a view of `buffer` [bytes] uint8, which holds the tensors' bytes, as [words] integers."""
    return buffer.view(_WORDS[min(spec.dtype.itemsize for spec in tensors)])


def make_delta(former: Tensor, new: Tensor) -> tuple[int, Delta | None]:
    """Return how many words have changed, and the delta; None if it takes as many bytes as all words.

    former, new: [words] of the same integer dtype, on the CPU.
    """
    changed = pad(former != new, (0, -new.numel() % _BLOCK)).view(-1, _BLOCK)
    counts = changed.sum(1, dtype=torch.int16)
    number = int(counts.sum(dtype=torch.int64))
    if counts.nbytes + number * (1 + new.itemsize) >= new.nbytes:
        return number, None
    offsets, values = [], []
    for part, words in zip(changed.split(_SLICE), new.split(_SLICE * _BLOCK), strict=True):
        positions = part.view(-1).nonzero()[:, 0]
        offsets.append((positions % _BLOCK).to(torch.uint8))
        values.append(words[positions])
    return number, Delta(counts=counts, offsets=torch.cat(offsets), values=torch.cat(values))


def apply_delta(delta: Delta, buffer: Tensor) -> None:
    """Write the changed words into `buffer` [bytes] uint8, on the CPU.

    Raises ValueError for a delta of a buffer of another size; some words may have been written by then.
    """
    words = buffer.view(delta.values.dtype)
    counts = delta.counts.to(torch.int64)
    lengths = [counts.numel() * _BLOCK - words.numel(), int(counts.sum()), delta.offsets.numel(), delta.values.numel()]
    if lengths[0] not in range(_BLOCK) or len(set(lengths[1:])) > 1:
        raise ValueError(f"the delta is not one of {words.numel():,} words of {words.dtype}")
    start = 0
    for part, target in zip(counts.split(_SLICE), words.split(_SLICE * _BLOCK), strict=True):
        end = start + int(part.sum())
        blocks = torch.arange(part.numel()).repeat_interleave(part)
        positions = blocks * _BLOCK + delta.offsets[start:end]
        if positions.numel() and int(positions.max()) >= target.numel():
            raise ValueError("the delta has words beyond the buffer's end")
        target[positions] = delta.values[start:end]
        start = end

"""How published tensors are cut into buckets. Pure: names, shapes and dtypes in, buckets out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors of one dtype that travel as one flat buffer, in this order."""

    names: tuple[str, ...]
    """Hugging Face names"""
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]

    def request(self, group_name: str) -> dict[str, Any]:
        """What a server must know before it receives the buffer (SGLang's /update_weights_from_distributed)."""
        return {
            "names": list(self.names),
            "dtypes": [str(self.dtype).removeprefix("torch.")] * len(self.names),
            "shapes": [list(shape) for shape in self.shapes],
            "group_name": group_name,
            "load_format": "flattened_bucket",
        }


def split_into_buckets(named_tensors: Sequence[tuple[str, Tensor]], bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most `bucket_bytes` (a larger tensor travels alone) and of one dtype, in the order given.

    One dtype per bucket keeps every tensor's offset a multiple of its item size, as the server's views need.
    """
    groups: list[list[tuple[str, Tensor]]] = []
    size = 0
    for name, tensor in named_tensors:
        if not groups or size + tensor.nbytes > bucket_bytes or tensor.dtype != groups[-1][0][1].dtype:
            groups.append([])
            size = 0
        groups[-1].append((name, tensor))
        size += tensor.nbytes
    return [
        Bucket(
            names=tuple(name for name, _ in group),
            dtype=group[0][1].dtype,
            shapes=tuple(tuple(tensor.shape) for _, tensor in group),
        )
        for group in groups
    ]

"""Exchange small JSON values between ranks, without pickle."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's value on every rank; the values of other ranks are ignored. Collective over `group` (gloo)."""
    encoded = _encode(value) if dist.get_rank(group) == 0 else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor(encoded.numel())
    dist.broadcast(size, group_src=0, group=group)
    if dist.get_rank(group) != 0:
        encoded = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(encoded, group_src=0, group=group)
    return json.loads(bytes(encoded.tolist()))


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks. Collective over `group` (gloo)."""
    encoded = _encode(value)
    sizes = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor(encoded.numel()), group=group)
    width = int(max(sizes))
    padded = torch.zeros(width, dtype=torch.uint8)
    padded[: encoded.numel()] = encoded
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [json.loads(bytes(row[: int(size)].tolist())) for row, size in zip(gathered, sizes, strict=True)]


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)

"""Combine named statistics over ranks, and add up parts of a loss over ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def reduce_named(
    local: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None,
    *,
    sums: Sequence[str],
    maxima: Sequence[str],
    data_group: dist.ProcessGroup,
    pipeline_group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the sums and maxima over all data-parallel ranks by name, equal on every rank.

    `local`: [] float64 tensors on the last pipeline stage, None on the others; a name of `sums` or `maxima` that is
    missing there counts as 0. Collective over `pipeline_group`, and on the last stage over `data_group` first
    (context-parallel ranks included). Raises ValueError for a name that is neither in `sums` nor in `maxima`.
    """
    totals = torch.zeros(len(sums), dtype=torch.float64, device=device)
    largest = torch.zeros(len(maxima), dtype=torch.float64, device=device)
    if local is not None:
        totals, largest = _pack(local[0], sums, totals), _pack(local[1], maxima, largest)
        dist.all_reduce(totals, group=data_group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=data_group)
    both = torch.cat([totals, largest])
    dist.broadcast(both, group_src=pipeline_group.size() - 1, group=pipeline_group)
    values = both.tolist()
    return (
        dict(zip(sums, values[: len(sums)], strict=True)),
        dict(zip(maxima, values[len(sums) :], strict=True)),
    )


def _pack(values: Mapping[str, Tensor], names: Sequence[str], zeros: Tensor) -> Tensor:
    """Return the values in the order of `names`, in which every rank sends them."""
    if unknown := values.keys() - set(names):
        raise ValueError(f"no rank expects {sorted(unknown)}")
    if not names:
        return zeros
    return torch.stack([values.get(name, zero) for name, zero in zip(names, zeros, strict=True)])


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Every rank's loss depends on the sum, so every rank's values get the gradients of all losses.
        (gradient,) = gradients
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_over_group(group: dist.ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    """Return a differentiable all-reduce over `group`; the identity for None and for a group of one."""
    if group is None or group.size() == 1:
        return lambda values: values
    return lambda values: _SumOverGroup.apply(values, group)

"""Sums over ranks: of statistics of the last pipeline stage, made known to every rank, and of parts of a loss."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def reduce_statistics(
    local: tuple[Tensor, Tensor] | None,
    *,
    num_sums: int,
    num_maxima: int,
    data_group: dist.ProcessGroup,
    pipeline_group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[list[float], list[float]]:
    """(sums, maxima) over all data-parallel ranks, equal on every rank.

    `local`: ([num_sums], [num_maxima]) float64 on the last pipeline stage, None on the others. Collective over
    `pipeline_group`, and on the last stage over `data_group` first (context-parallel ranks included).
    """
    sums = torch.zeros(num_sums, dtype=torch.float64, device=device)
    maxima = torch.zeros(num_maxima, dtype=torch.float64, device=device)
    if local is not None:
        sums, maxima = local
        dist.all_reduce(sums, group=data_group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=data_group)
    both = torch.cat([sums, maxima])
    dist.broadcast(both, group_src=pipeline_group.size() - 1, group=pipeline_group)
    values = both.tolist()
    return values[:num_sums], values[num_sums:]


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
    """A differentiable all-reduce over `group`; the identity for None and for a group of one."""
    if group is None or group.size() == 1:
        return lambda values: values
    return lambda values: _SumOverGroup.apply(values, group)

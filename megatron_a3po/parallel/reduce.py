"""Statistics of the last pipeline stage, reduced over data-parallel ranks and made known to every rank."""

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
    `pipeline_group`, and on the last stage over `data_group` first.
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

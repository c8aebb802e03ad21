"""From rewards to advantages, by group id: a group may have lost a member, so position in the batch means nothing."""

from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to the group's standard deviation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    values: Tensor
    """[trajectories] float32"""
    num_groups: int
    num_zero_variance_groups: int
    """Groups that teach nothing: a single member, or equal rewards"""


def grpo_advantages(rewards: Tensor, group_ids: Tensor) -> Advantages:
    """(reward - mean of the group) / (standard deviation of the group + 1e-4); DeepSeekMath, arXiv 2402.03300, eq. 3.

    rewards [trajectories] float, group_ids [trajectories] int64. The standard deviation is the unbiased one.
    """
    _, group, count = torch.unique(group_ids, return_inverse=True, return_counts=True)
    rewards = rewards.double()
    mean = torch.zeros(len(count), dtype=rewards.dtype).index_add(0, group, rewards) / count
    deviation = rewards - mean[group]
    variance = torch.zeros_like(mean).index_add(0, group, deviation**2) / (count - 1).clamp(min=1)
    equal = _per_group(rewards, group, len(count), "amax") == _per_group(rewards, group, len(count), "amin")
    values = deviation / (variance.sqrt()[group] + EPSILON)
    return Advantages(
        values=torch.where(equal[group], 0.0, values).float(),
        num_groups=len(count),
        num_zero_variance_groups=int(equal.sum()),
    )


def _per_group(values: Tensor, group: Tensor, num_groups: int, reduce: str) -> Tensor:
    return torch.zeros(num_groups, dtype=values.dtype).scatter_reduce(0, group, values, reduce, include_self=False)

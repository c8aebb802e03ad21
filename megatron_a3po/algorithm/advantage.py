"""Turn rewards into advantages.

Trajectories belong together by group id and not by position, because a group may have lost a member.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it."""
AdvantageMethod = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    values: Tensor
    """[trajectories] float32"""
    num_groups: int
    num_zero_variance_groups: int
    """Groups without a comparison: one member, or equal rewards"""


def compute_advantages(rewards: Tensor, group_ids: Tensor, method: AdvantageMethod = "grpo") -> Advantages:
    """Return the advantages of trajectories by `method`, computed in float64.

    rewards [trajectories] float, group_ids [trajectories] int64.
    """
    groups = _Groups(rewards.double(), group_ids)
    return Advantages(
        values=_METHODS[method](groups).float(),
        num_groups=groups.num_groups,
        num_zero_variance_groups=int(groups.equal.sum()),
    )


class _Groups:
    """Rewards [trajectories] float64, with statistics of their groups."""

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        self.rewards = rewards
        _, self._index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
        self.num_groups = len(counts)
        # Compare rewards directly: in floating point, the mean of equal rewards may differ from them.
        self.equal = self._reduce("amax") == self._reduce("amin")
        self.size = counts[self._index]
        """[trajectories]: size of the trajectory's own group. The next two have the same layout."""
        deviation = rewards - (self._reduce("sum") / counts)[self._index]
        self.deviation = torch.where(self.equal[self._index], 0.0, deviation)
        variance = torch.zeros_like(counts, dtype=rewards.dtype).index_add(0, self._index, self.deviation**2)
        self.standard_deviation = (variance / (counts - 1).clamp(min=1)).sqrt()[self._index]

    def _reduce(self, reduce: str) -> Tensor:
        initial = torch.zeros(self.num_groups, dtype=self.rewards.dtype)
        return initial.scatter_reduce(0, self._index, self.rewards, reduce, include_self=False)


def _grpo(groups: _Groups) -> Tensor:
    """(reward - mean of the group) / standard deviation of the group (unbiased); arXiv 2402.03300, section 4.1.2."""
    return groups.deviation / (groups.standard_deviation + EPSILON)


def _dr_grpo(groups: _Groups) -> Tensor:
    """reward - mean of the group, so that the spread of rewards does not weight prompts; arXiv 2503.20783."""
    return groups.deviation


def _rloo(groups: _Groups) -> Tensor:
    """reward - mean of the *other* members of the group; arXiv 2402.14740."""
    return groups.deviation * groups.size / (groups.size - 1).clamp(min=1)


def _reinforce_pp(groups: _Groups) -> Tensor:
    """(reward - mean of the batch) / standard deviation of the batch; arXiv 2501.03262."""
    rewards = groups.rewards
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + EPSILON)


_METHODS: dict[AdvantageMethod, Callable[[_Groups], Tensor]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "reinforce_pp": _reinforce_pp,
}


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Return the penalties to add to the rewards of responses near the length limit; DAPO, arXiv 2503.14476, eq. 13.

    The penalty is 0 up to max_tokens - buffer_tokens and falls linearly to -1 at max_tokens. With buffer_tokens = 0
    there is none. lengths [trajectories] int64; returns [trajectories] float32.
    """
    if buffer_tokens == 0:
        return torch.zeros(lengths.shape, dtype=torch.float32)
    return -((lengths - (max_tokens - buffer_tokens)).float() / buffer_tokens).clamp(0.0, 1.0)

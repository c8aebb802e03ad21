"""Interpolate the proximal policy, which is the centre of the trust region (A-3PO, arXiv 2512.06547).

It lies between the policy that sampled a token and the policy in training, nearer to the latter for staler tokens.
Nothing here needs a forward pass. The proximal policy of decoupled PPO ("recompute") needs one, in `actor`.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Schedule = Literal["inverse", "inverse_sqrt"] | float
"""The weight of the behaviour policy at staleness d >= 1: 1/d (the paper), 1/sqrt(d), or a constant"""
Anchor = Literal["target", "behaviour"]
"""The proximal policy of a fresh token (d = 0)"""


def behaviour_weight(staleness: Tensor, schedule: Schedule = "inverse", fresh_anchor: Anchor = "target") -> Tensor:
    """Return beta, the weight of the behaviour policy in [0, 1]; float32, shaped like `staleness` (integer, >= 0).

    Fresh tokens have beta = 0, or 1 with the anchor "behaviour" (AReaL's choice).
    """
    d = staleness.clamp(min=1).float()
    if schedule == "inverse":
        stale = 1.0 / d
    elif schedule == "inverse_sqrt":
        stale = d.rsqrt()
    else:
        stale = torch.full_like(d, schedule)
    return torch.where(staleness == 0, 0.0 if fresh_anchor == "target" else 1.0, stale)


def proximal_logprobs(
    target_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    staleness: Tensor,
    schedule: Schedule = "inverse",
    fresh_anchor: Anchor = "target",
) -> Tensor:
    """Return log pi_proximal = beta * log pi_behaviour + (1 - beta) * log pi_target, without gradient.

    All tensors are [tokens], log-probs float32. The result lies between the two log-probs.
    """
    beta = behaviour_weight(staleness, schedule, fresh_anchor)
    return beta * behaviour_logprobs + (1 - beta) * target_logprobs.detach()


def linear_proximal_logprobs(
    target_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    staleness: Tensor,
    schedule: Schedule = "inverse",
    fresh_anchor: Anchor = "target",
) -> Tensor:
    """Return log(beta * pi_behaviour + (1 - beta) * pi_target): interpolate probabilities instead of their logs."""
    beta = behaviour_weight(staleness, schedule, fresh_anchor)
    return torch.logaddexp(beta.log() + behaviour_logprobs, (1 - beta).log() + target_logprobs.detach())


Interpolation = Callable[[Tensor, Tensor, Tensor, Schedule, Anchor], Tensor]
"""(target log-probs, behaviour log-probs, staleness, schedule, anchor), of [tokens] each, to log pi_proximal"""
INTERPOLATIONS: dict[str, Interpolation] = {"loglinear": proximal_logprobs, "linear": linear_proximal_logprobs}
"""By the values of `proximal` in a configuration"""

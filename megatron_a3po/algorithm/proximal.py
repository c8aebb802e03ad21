"""The proximal policy, which the trust region is measured against. A-3PO's is interpolated, not computed.

arXiv 2512.06547: between the policy that sampled a token and the policy being trained, nearer to the latter the staler
the token is. None of the methods here needs a forward pass; decoupled PPO's own ("recompute") takes one in `actor`.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Schedule = Literal["inverse", "inverse_sqrt"] | float
"""How the behaviour policy's weight falls with staleness d >= 1: 1/d (the paper), 1/sqrt(d), or a constant."""
Anchor = Literal["target", "behaviour"]
"""Which policy a fresh token (d = 0) is measured against."""


def behaviour_weight(staleness: Tensor, schedule: Schedule = "inverse", fresh_anchor: Anchor = "target") -> Tensor:
    """beta, the weight of the behaviour policy, in [0, 1]; float32 of the shape of `staleness` (integer, >= 0).

    Fresh tokens have beta = 0, or with the anchor "behaviour" (AReaL's choice) 1.
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
    """log pi_proximal = beta * log pi_behaviour + (1 - beta) * log pi_target, without gradient.

    All tensors [tokens]; log-probs float32. The result lies between the two log-probs.
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
    """log(beta * pi_behaviour + (1 - beta) * pi_target): the same interpolation of probabilities instead of logs."""
    beta = behaviour_weight(staleness, schedule, fresh_anchor)
    return torch.logaddexp(beta.log() + behaviour_logprobs, (1 - beta).log() + target_logprobs.detach())


Interpolation = Callable[[Tensor, Tensor, Tensor, Schedule, Anchor], Tensor]
"""(target log-probs, behaviour log-probs, staleness, schedule, anchor), of [tokens] each, to log pi_proximal"""
INTERPOLATIONS: dict[str, Interpolation] = {"loglinear": proximal_logprobs, "linear": linear_proximal_logprobs}
"""By the names that `proximal` has in a configuration"""

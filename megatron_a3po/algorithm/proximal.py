"""The proximal policy of A-3PO: interpolated, not computed (arXiv 2512.06547, the staleness-aware approximation)."""

import torch
from torch import Tensor


def behaviour_weight(staleness: Tensor) -> Tensor:
    """beta, the weight of the behaviour policy: 0 for fresh tokens, 1 / staleness for others.

    staleness: integer, any shape, >= 0. Returns float32 of that shape.
    """
    return torch.where(staleness == 0, 0.0, 1.0 / staleness.clamp(min=1).float())


def proximal_logprobs(target_logprobs: Tensor, behaviour_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """log pi_proximal = beta * log pi_behaviour + (1 - beta) * log pi_target, without gradient.

    All arguments [tokens]; log-probs float32. Between the two log-probs, and nearer to the target the staler the token.
    """
    beta = behaviour_weight(staleness)
    return beta * behaviour_logprobs + (1 - beta) * target_logprobs.detach()

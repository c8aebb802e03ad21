"""The A-3PO loss (arXiv 2512.06547): decoupled PPO around a proximal policy that needs no extra forward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from megatron_a3po.algorithm.diagnostics import TokenTerms, Totals, measure
from megatron_a3po.algorithm.proximal import proximal_logprobs

Level = Literal["token", "sequence"]
MAX_LOG_RATIO = 20.0
"""Largest |log pi_target - log pi_behaviour| in the loss. Beyond it both log ratios shrink by one factor, so that they
and their product stay finite in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """The loss of one microbatch, with its totals."""

    loss_sum: Tensor
    """[] float32 with graph: the masked sum over tokens. The caller divides by the whole batch's loss tokens."""
    totals: Totals[Tensor]
    """detached"""


def a3po_loss(
    target_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    staleness: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_epsilon_low: float,
    clip_epsilon_high: float,
    dual_clip: float | None = None,
    weight_cap: float | None = None,
    weight_cap_mode: Literal["mask", "clamp"] = "mask",
) -> LossOutput:
    """Compute decoupled PPO around p = stop_gradient(beta * b + (1 - beta) * theta).

    beta is 0 at staleness 0, else 1 / staleness. Arguments and result are those of `decoupled_ppo_loss`.
    """
    return decoupled_ppo_loss(
        target_logprobs,
        behaviour_logprobs,
        proximal_logprobs(target_logprobs, behaviour_logprobs, staleness),
        staleness,
        advantages,
        loss_mask,
        clip_epsilon_low=clip_epsilon_low,
        clip_epsilon_high=clip_epsilon_high,
        dual_clip=dual_clip,
        weight_cap=weight_cap,
        weight_cap_mode=weight_cap_mode,
    )


def decoupled_ppo_loss(
    target_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    proximal: Tensor,
    staleness: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_epsilon_low: float,
    clip_epsilon_high: float,
    dual_clip: float | None = None,
    weight_cap: float | None = None,
    weight_cap_mode: Literal["mask", "clamp"] = "mask",
    weight_cap_level: Level = "token",
    ratio_level: Level = "token",
    sequence_ids: Tensor | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> LossOutput:
    """Compute the loss of decoupled PPO (arXiv 2110.00641) as a sum over tokens:

    - sum_t mask_t * w_t * min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)

    with w = pi_proximal / pi_behaviour (no gradient) and r = pi_target / pi_proximal.

    All tensors are [tokens]: log-probs and advantages float32, staleness int64 (only for the diagnostics), mask bool,
    sequence_ids int64, each below `tokens` (only for the sequence levels). Only `target_logprobs` carries gradient.
    `sum_over_ranks` adds up a tensor, differentiably, over the ranks that hold tokens of the same sequences.

    * `dual_clip` bounds the surrogate of negative advantages by dual_clip * |A|, before w; arXiv 1912.09729.
    * A token with w above `weight_cap` contributes nothing ("mask"), or its w is cut to the cap ("clamp"). At the level
      "sequence" the cap is compared with the geometric mean of w over the sequence. Above it, all its tokens contribute
      nothing, or their weights are scaled down until that mean is the cap.
    * With `ratio_level` "sequence", r and w are geometric means over the sequence; GSPO, arXiv 2507.18071.

    The caller divides `loss_sum` by the loss tokens of the whole batch, counted before any cap. Values in masked
    positions do not change a bit of loss and gradients. Loss tokens with log-probs that are not finite contribute
    nothing and are counted. Raises ValueError if a sequence level is used without sequence_ids.
    """
    used = loss_mask & target_logprobs.isfinite() & behaviour_logprobs.isfinite() & proximal.isfinite()

    # Replace them before exp: otherwise the gradient of the branch that torch.where drops would be 0 * inf = NaN.
    theta = torch.where(used, target_logprobs, 0.0)
    b = torch.where(used, behaviour_logprobs, 0.0)
    p = torch.where(used, proximal.detach(), 0.0)
    advantage = torch.where(used, advantages, 0.0)
    shrink = (MAX_LOG_RATIO / (theta.detach() - b).abs()).clamp(max=1.0)
    log_w, log_r = (p - b) * shrink, _with_value(theta - p, (theta.detach() - p) * shrink)
    sequence_mean = partial(_sequence_mean, used=used, sequence_ids=sequence_ids, sum_over_ranks=sum_over_ranks)
    if ratio_level == "sequence":
        log_w, log_r = sequence_mean(log_w), sequence_mean(log_r)

    w = bounded_exp(log_w)
    r = bounded_exp(log_r)

    surrogate = torch.minimum(r * advantage, r.clamp(1 - clip_epsilon_low, 1 + clip_epsilon_high) * advantage)
    dual_clipped = torch.zeros_like(used)
    if dual_clip is not None:
        dual_clipped = (advantage < 0) & (r > dual_clip)
        surrogate = torch.where(dual_clipped, dual_clip * advantage, surrogate)

    over_cap = w if weight_cap_level == "token" else bounded_exp(sequence_mean(log_w))
    weight, capped = _cap(w, over_cap, used, weight_cap, weight_cap_mode)
    loss_sum = -(weight * surrogate).sum()
    terms = TokenTerms(
        loss_mask=loss_mask,
        used=used,
        target_logprobs=theta.detach(),
        behaviour_logprobs=b,
        staleness=staleness,
        importance_weight=w,
        ratio=r.detach(),
        capped=capped,
        clipped_low=(advantage < 0) & (r < 1 - clip_epsilon_low),
        clipped_high=(advantage > 0) & (r > 1 + clip_epsilon_high),
        dual_clipped=dual_clipped,
    )
    return LossOutput(loss_sum=loss_sum, totals=measure(terms, loss_sum.detach(), MAX_LOG_RATIO))


def kl_to_reference(
    target_logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k3"] = "k3"
) -> Tensor:
    """Estimate KL(target || reference) per token; returns [tokens] float32 with gradient.

    k1 = log pi_target - log pi_reference; k3 = rho - 1 - log rho with rho = pi_reference / pi_target, which is never
    negative and varies less (Schulman, "Approximating KL divergence"; DeepSeekMath, arXiv 2402.03300, eq. 4).
    """
    log_rho = reference_logprobs.detach() - target_logprobs
    return -log_rho if estimator == "k1" else bounded_exp(log_rho) - 1 - log_rho


def _cap(
    w: Tensor, compared: Tensor, used: Tensor, cap: float | None, mode: Literal["mask", "clamp"]
) -> tuple[Tensor, Tensor]:
    """Return the weight to apply and the tokens that the cap changed. `compared`: w, or its mean over the sequence."""
    if cap is None:
        return w, torch.zeros_like(used)
    capped = used & (compared > cap)
    return torch.where(capped, 0.0 if mode == "mask" else w * (cap / compared), w), capped


def _sequence_mean(
    values: Tensor, used: Tensor, sequence_ids: Tensor | None, sum_over_ranks: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return, at each used token, the mean over the used tokens of its sequence; 0 elsewhere. Differentiable."""
    if sequence_ids is None:
        raise ValueError("a loss at the level of sequences needs sequence_ids")
    index = torch.where(used, sequence_ids, 0)
    per_token = torch.stack([torch.where(used, values, 0.0), used.to(values.dtype)])
    # Use the number of tokens as a bound on the number of sequences: ranks that share sequences have the same.
    totals, counts = sum_over_ranks(torch.zeros_like(per_token).index_add(1, index, per_token))
    return torch.where(used, (totals / counts.clamp(min=1))[index], 0.0)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of the log ratio cut to +-MAX_LOG_RATIO. The gradient ignores the cut."""
    return _with_value(log_ratio, log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()


def _with_value(tensor: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the gradient of `tensor`."""
    return tensor - tensor.detach() + value

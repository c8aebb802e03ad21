"""The A-3PO loss (arXiv 2512.06547): decoupled PPO around a proximal policy that needs no forward pass of its own."""

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
"""Beyond e^20 between target and behaviour, both ratios are those of where the line between them reaches it, so that
their product and float32 stay finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """The loss of one microbatch, and what is worth knowing about it."""

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
    """Decoupled PPO around p = stop_gradient(beta * b + (1 - beta) * theta), where beta = 0 or 1 / staleness.

    Arguments and result as in `decoupled_ppo_loss`.
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
    """- sum_t mask_t * w_t * min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)

    with w = pi_proximal / pi_behaviour (no gradient) and r = pi_target / pi_proximal; decoupled PPO, arXiv 2110.00641.

    All tensors [tokens]: log-probs and advantages float32, staleness int64 (for the diagnostics only), mask bool,
    sequence_ids int64, each below `tokens` (needed by the sequence levels). `target_logprobs` alone carries gradient.
    `sum_over_ranks`: differentiable sum of a tensor over the ranks that hold other tokens of the same sequences.

    * `dual_clip` bounds the surrogate of negative advantages by dual_clip * |A|, before w; arXiv 1912.09729.
    * A token whose w exceeds `weight_cap` gives nothing ("mask"), or has w cut to the cap ("clamp"). At the level
      "sequence" the geometric mean of w over the sequence is compared: then all its tokens give nothing, or their
      weights are scaled down until that mean is the cap.
    * `ratio_level` "sequence": r, and w with it, is the geometric mean over the sequence; GSPO, arXiv 2507.18071.

    `loss_sum` is a sum: the caller divides by the loss tokens of the whole batch, counted before any cap. Whatever
    stands in masked positions leaves loss and gradients bit for bit as they are; loss tokens whose log-probs are not
    finite give nothing and are counted.
    """
    used = loss_mask & target_logprobs.isfinite() & behaviour_logprobs.isfinite() & proximal.isfinite()

    # Replaced before exp: in a branch that torch.where does not take, the gradient would be 0 * inf = NaN.
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
    """The weight that is applied, and which tokens the cap changed. `compared`: w, or the mean of its sequence."""
    if cap is None:
        return w, torch.zeros_like(used)
    capped = used & (compared > cap)
    return torch.where(capped, 0.0 if mode == "mask" else w * (cap / compared), w), capped


def _sequence_mean(
    values: Tensor, used: Tensor, sequence_ids: Tensor | None, sum_over_ranks: Callable[[Tensor], Tensor]
) -> Tensor:
    """Mean over the used tokens of each sequence, at each of its used tokens; 0 elsewhere. With gradient."""
    if sequence_ids is None:
        raise ValueError("a loss at the level of sequences needs sequence_ids")
    index = torch.where(used, sequence_ids, 0)
    per_token = torch.stack([torch.where(used, values, 0.0), used.to(values.dtype)])
    # There are at most as many sequences as tokens, and that number is the same on ranks that share the sequences.
    totals, counts = sum_over_ranks(torch.zeros_like(per_token).index_add(1, index, per_token))
    return torch.where(used, (totals / counts.clamp(min=1))[index], 0.0)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp with the argument cut to +-MAX_LOG_RATIO; the gradient passes as if it were not."""
    return _with_value(log_ratio, log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()


def _with_value(tensor: Tensor, value: Tensor) -> Tensor:
    """`value`, with the gradient of `tensor`."""
    return tensor - tensor.detach() + value

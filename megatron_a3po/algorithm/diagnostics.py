"""What a training step says about its tokens: named sums and maxima that combine over microbatches and ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SUMS = (
    "loss",
    "loss_tokens",
    "used_tokens",
    "nonfinite_tokens",
    "clamped_tokens",
    "fresh_tokens",
    "staleness",
    "importance_weight",
    "capped_tokens",
    "ratio",
    "clipped_low_tokens",
    "clipped_high_tokens",
    "dual_clipped_tokens",
    "kl_k1",
    "kl_k3",
    "target_over_behaviour",
    "target_over_behaviour_squared",
    "fresh_logprob_difference",
)
MAXIMA = ("loss_staleness_max", "importance_weight_max", "ratio_max", "fresh_logprob_difference_max")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTerms:
    """The loss's terms per token, all [tokens] and detached; in tokens that are not `used`, finite but meaningless."""

    loss_mask: Tensor
    used: Tensor
    """bool: loss tokens with finite log-probs"""
    target_logprobs: Tensor
    behaviour_logprobs: Tensor
    staleness: Tensor
    importance_weight: Tensor
    """before the cap"""
    ratio: Tensor
    capped: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor


def measure(terms: TokenTerms, loss_sum: Tensor, max_log_ratio: float) -> tuple[Tensor, Tensor]:
    """([len(SUMS)], [len(MAXIMA)]) float64 over the microbatch."""
    used = terms.used
    log_ratio = terms.target_logprobs - terms.behaviour_logprobs
    log_rho = log_ratio.clamp(-max_log_ratio, max_log_ratio).double()
    rho = log_rho.exp()
    staleness = torch.where(used, terms.staleness, 0)
    fresh = used & (staleness == 0)
    difference = log_ratio.abs()
    zero = torch.zeros((), dtype=torch.float64, device=used.device)

    def total(values: Tensor, where: Tensor = used) -> Tensor:
        return torch.where(where, values.double(), 0.0).sum()

    def largest(values: Tensor, where: Tensor = used) -> Tensor:
        return torch.maximum(torch.where(where, values.double(), 0.0).amax(), zero) if values.numel() else zero

    sums = (
        loss_sum.double(),
        terms.loss_mask.sum().double(),
        used.sum().double(),
        (terms.loss_mask & ~used).sum().double(),
        (used & (difference > max_log_ratio)).sum().double(),
        fresh.sum().double(),
        total(staleness),
        total(terms.importance_weight),
        terms.capped.sum().double(),
        total(terms.ratio),
        terms.clipped_low.sum().double(),
        terms.clipped_high.sum().double(),
        terms.dual_clipped.sum().double(),
        total(-log_rho),
        total(rho - 1 - log_rho),
        total(rho),
        total(rho**2),
        total(difference, fresh),
    )
    maxima = (
        largest(staleness),
        largest(terms.importance_weight),
        largest(terms.ratio),
        largest(difference, fresh),
    )
    return torch.stack(sums), torch.stack(maxima)


def summarize(sums: Sequence[float], maxima: Sequence[float]) -> dict[str, float]:
    """Readable metrics of one training step from the totals over all microbatches and data-parallel ranks.

    KL(behaviour || target) as the estimators k1 = -log rho and k3 = rho - 1 - log rho, where rho is
    pi_target / pi_behaviour on tokens of the behaviour policy; effective sample size of rho as a share of the tokens.
    In all three the log of rho is cut to what `measure` was given; "clamped_tokens" says how often.
    """
    total = dict(zip(SUMS, sums, strict=True))
    tokens = total["loss_tokens"]
    used = max(total["used_tokens"], 1.0)
    squared = total["target_over_behaviour_squared"]
    metrics = {
        "loss": total["loss"] / max(tokens, 1.0),
        "loss_tokens": tokens,
        "nonfinite_tokens": total["nonfinite_tokens"],
        "clamped_tokens": total["clamped_tokens"],
        "fresh_tokens": total["fresh_tokens"],
        "loss_staleness_mean": total["staleness"] / used,
        "importance_weight_mean": total["importance_weight"] / used,
        "capped_share": total["capped_tokens"] / used,
        "ratio_mean": total["ratio"] / used,
        "clipped_low_share": total["clipped_low_tokens"] / used,
        "clipped_high_share": total["clipped_high_tokens"] / used,
        "dual_clipped_share": total["dual_clipped_tokens"] / used,
        "kl_k1": total["kl_k1"] / used,
        "kl_k3": total["kl_k3"] / used,
        "effective_sample_share": total["target_over_behaviour"] ** 2 / (used * squared) if squared else math.nan,
        "fresh_logprob_difference_mean": total["fresh_logprob_difference"] / max(total["fresh_tokens"], 1.0),
    }
    metrics["clipped_share"] = (
        metrics["clipped_low_share"] + metrics["clipped_high_share"] + metrics["dual_clipped_share"]
    )
    return metrics | dict(zip(MAXIMA, maxima, strict=True))

"""Measure a training step's tokens: named sums and maxima that combine over microbatches and ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
class Totals[Value: (Tensor, float)]:
    """Sums and maxima by name: [] float64 tensors of a microbatch, or numbers of a whole batch.

    A name that is missing stands for 0.
    """

    sums: Mapping[str, Value] = field(default_factory=dict)
    maxima: Mapping[str, Value] = field(default_factory=dict)


def as_numbers(totals: Totals[Tensor]) -> Totals[float]:
    """Copy totals to the host."""
    sums, maxima = ({name: float(value) for name, value in part.items()} for part in (totals.sums, totals.maxima))
    return Totals(sums=sums, maxima=maxima)


def combine_tensors(parts: Iterable[Totals[Tensor]]) -> Totals[Tensor]:
    """Add the sums of several microbatches by name, and take the largest of their maxima."""
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for part in parts:
        sums |= {name: sums[name] + value if name in sums else value for name, value in part.sums.items()}
        for name, value in part.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
    return Totals(sums=sums, maxima=maxima)


def combine_numbers(parts: Sequence[Totals[float]]) -> Totals[float]:
    """Add the sums of several minibatches by name, and take the largest of their maxima."""
    return Totals(
        sums={name: sum(part.sums.get(name, 0.0) for part in parts) for part in parts for name in part.sums},
        maxima={name: max(part.maxima.get(name, 0.0) for part in parts) for part in parts for name in part.maxima},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTerms:
    """The terms of the loss per token, all [tokens] and detached; finite but meaningless unless `used`."""

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


def measure(terms: TokenTerms, loss_sum: Tensor, max_log_ratio: float) -> Totals[Tensor]:
    """Return the totals of one microbatch, under the names in `SUMS` and `MAXIMA`."""
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

    return Totals(
        sums={
            "loss": loss_sum.double(),
            "loss_tokens": terms.loss_mask.sum().double(),
            "used_tokens": used.sum().double(),
            "nonfinite_tokens": (terms.loss_mask & ~used).sum().double(),
            "clamped_tokens": (used & (difference > max_log_ratio)).sum().double(),
            "fresh_tokens": fresh.sum().double(),
            "staleness": total(staleness),
            "importance_weight": total(terms.importance_weight),
            "capped_tokens": terms.capped.sum().double(),
            "ratio": total(terms.ratio),
            "clipped_low_tokens": terms.clipped_low.sum().double(),
            "clipped_high_tokens": terms.clipped_high.sum().double(),
            "dual_clipped_tokens": terms.dual_clipped.sum().double(),
            "kl_k1": total(-log_rho),
            "kl_k3": total(rho - 1 - log_rho),
            "target_over_behaviour": total(rho),
            "target_over_behaviour_squared": total(rho**2),
            "fresh_logprob_difference": total(difference, fresh),
        },
        maxima={
            "loss_staleness_max": largest(staleness),
            "importance_weight_max": largest(terms.importance_weight),
            "ratio_max": largest(terms.ratio),
            "fresh_logprob_difference_max": largest(difference, fresh),
        },
    )


def summarize(totals: Totals[float]) -> dict[str, float]:
    """Return readable metrics of one training step from the totals over all microbatches and data-parallel ranks.

    With rho = pi_target / pi_behaviour, KL(behaviour || target) is estimated by k1 = -log rho and
    k3 = rho - 1 - log rho, and the effective sample size of rho is given as a share of the tokens. All three use
    log rho cut to the `max_log_ratio` of `measure`; "clamped_tokens" counts the tokens that this changes.
    """
    total = totals.sums
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
    return metrics | {name: totals.maxima[name] for name in MAXIMA}

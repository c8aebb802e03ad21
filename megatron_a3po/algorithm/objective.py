"""Compute the loss of a microbatch from its log-probs, by the chosen method, with everything worth reporting."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_a3po.algorithm import proximal
from megatron_a3po.algorithm.diagnostics import MAXIMA, SUMS, Totals, summarize
from megatron_a3po.algorithm.loss import bounded_exp, decoupled_ppo_loss, kl_to_reference
from megatron_a3po.algorithm.proximal import Anchor, Schedule
from megatron_a3po.types import Microbatch

_MEANS = (
    "entropy",
    "behaviour_weight_mean",
    "kl_to_reference",
    "proximal_error",
    "importance_weight_error",
    "ratio_error",
)
"""Reported as means over loss tokens. The errors compare the approximation with a forward pass."""
PROXIMAL_SECONDS = "proximal_seconds"
SUM_NAMES, MAXIMUM_NAMES = (*SUMS, *_MEANS), (*MAXIMA, PROXIMAL_SECONDS)
"""Names of all totals that an objective may report"""


class Objective:
    """The loss of a training step by the chosen method. Its only state is a clock."""

    def __init__(
        self,
        *,
        proximal: str,
        loss: Mapping[str, Any],
        behaviour_weight: Schedule = "inverse",
        fresh_anchor: Anchor = "target",
        compare_with_recompute: bool = False,
        entropy_coefficient: float = 0.0,
        kl_coefficient: float = 0.0,
        kl_estimator: Literal["k1", "k3"] = "k3",
        sum_over_ranks: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> None:
        """All but the last come from `RunConfig.objective_options`.

        loss: options of `decoupled_ppo_loss`. sum_over_ranks adds up, differentiably, over the ranks that share the
        tokens of each sequence.
        """
        self._method = proximal
        self._loss_options = dict(loss)
        self._schedule, self._anchor = behaviour_weight, fresh_anchor
        self._entropy_coefficient, self._kl_coefficient = entropy_coefficient, kl_coefficient
        self._kl_estimator = kl_estimator
        self._sum_over_ranks = sum_over_ranks
        self.needs_recomputed_logprobs = proximal == "recompute" or compare_with_recompute
        self.proximal_seconds = 0.0
        """Host seconds spent on the proximal policy so far"""

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, microbatch: Microbatch, version: int, fresh_staleness: int = 0
    ) -> tuple[Tensor, Totals[Tensor]]:
        """Return the sum of the tokens' losses and its totals. `logprobs`, `entropy`: [tokens] float32 with graph.

        `fresh_staleness` is the staleness of tokens that `version` sampled. From the second optimizer step on a batch
        it is 1, because the weights have moved, and at 0 these tokens would have no trust region.
        """
        staleness = version - microbatch.weight_versions
        staleness = torch.where(staleness == 0, fresh_staleness, staleness)
        with self.counting_proximal_seconds():
            p = self._proximal(logprobs, microbatch, staleness)
        output = decoupled_ppo_loss(
            logprobs,
            microbatch.behaviour_logprobs,
            p,
            staleness,
            microbatch.advantages,
            microbatch.loss_mask,
            sequence_ids=microbatch.sequence_ids,
            sum_over_ranks=self._sum_over_ranks,
            **self._loss_options,
        )
        mask = microbatch.loss_mask
        more = {
            "entropy": torch.where(mask & entropy.isfinite(), entropy, 0.0).sum(),
            **self._weights(mask, staleness),
        }
        loss_sum = output.loss_sum
        if self._entropy_coefficient > 0:
            loss_sum = loss_sum - self._entropy_coefficient * more["entropy"]
        if microbatch.reference_logprobs is not None:
            more["kl_to_reference"] = self._kl(logprobs, microbatch.reference_logprobs, mask)
            loss_sum = loss_sum + self._kl_coefficient * more["kl_to_reference"]
        if microbatch.recomputed_logprobs is not None:
            more |= _errors(logprobs.detach(), microbatch.behaviour_logprobs, p, microbatch.recomputed_logprobs, mask)
        sums = {**output.totals.sums, **{name: value.detach().double() for name, value in more.items()}}
        return loss_sum, Totals(sums=sums, maxima=output.totals.maxima)

    def metrics(self, totals: Totals[float]) -> dict[str, float]:
        """Return readable metrics from the totals over microbatches and ranks, without those that were not computed."""
        metrics = summarize(totals)
        tokens = max(metrics["loss_tokens"], 1.0)
        means = {name: totals.sums.get(name, 0.0) / tokens for name in _MEANS if self._computes(name)}
        return metrics | means | {PROXIMAL_SECONDS: totals.maxima.get(PROXIMAL_SECONDS, 0.0)}

    def _computes(self, name: str) -> bool:
        if name == "behaviour_weight_mean":
            return self._method in proximal.INTERPOLATIONS
        if name == "kl_to_reference":
            return self._kl_coefficient > 0
        return name == "entropy" or self.needs_recomputed_logprobs

    @contextmanager
    def counting_proximal_seconds(self) -> Iterator[None]:
        """Add the time of the block to `proximal_seconds`."""
        start = time.perf_counter()
        yield
        self.proximal_seconds += time.perf_counter() - start

    def _proximal(self, logprobs: Tensor, microbatch: Microbatch, staleness: Tensor) -> Tensor:
        """Return log pi_proximal, [tokens] float32 without gradient."""
        match self._method:
            case "recompute":
                assert microbatch.recomputed_logprobs is not None
                return microbatch.recomputed_logprobs
            case "reuse_target":
                return logprobs.detach()
            case "behaviour":
                return microbatch.behaviour_logprobs
            case interpolation:
                interpolate = proximal.INTERPOLATIONS[interpolation]
        return interpolate(logprobs, microbatch.behaviour_logprobs, staleness, self._schedule, self._anchor)

    def _weights(self, mask: Tensor, staleness: Tensor) -> dict[str, Tensor]:
        if self._method not in proximal.INTERPOLATIONS:
            return {}
        beta = proximal.behaviour_weight(torch.where(mask, staleness, 0), self._schedule, self._anchor)
        return {"behaviour_weight_mean": torch.where(mask, beta, 0.0).sum()}

    def _kl(self, logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
        used = mask & logprobs.isfinite() & reference_logprobs.isfinite()
        theta, reference = torch.where(used, logprobs, 0.0), torch.where(used, reference_logprobs, 0.0)
        return kl_to_reference(theta, reference, self._kl_estimator).sum()


def _errors(theta: Tensor, b: Tensor, p: Tensor, recomputed: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the errors of p, w and r against those of decoupled PPO, summed over loss tokens with finite log-probs."""

    def total(ours: Tensor, theirs: Tensor) -> Tensor:
        difference = (ours - theirs).abs()
        return torch.where(mask & difference.isfinite(), difference, 0.0).sum()

    return {
        "proximal_error": total(p, recomputed),
        "importance_weight_error": total(bounded_exp(p - b), bounded_exp(recomputed - b)),
        "ratio_error": total(bounded_exp(theta - p), bounded_exp(theta - recomputed)),
    }

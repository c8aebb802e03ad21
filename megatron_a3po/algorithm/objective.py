"""From a microbatch's log-probs to its loss, by the configured method, with everything worth reporting."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_a3po.algorithm import proximal
from megatron_a3po.algorithm.diagnostics import MAXIMA, SUMS, summarize
from megatron_a3po.algorithm.loss import bounded_exp, decoupled_ppo_loss
from megatron_a3po.algorithm.regularization import kl_to_reference
from megatron_a3po.config import RunConfig
from megatron_a3po.types import Microbatch

_MORE_SUMS = (
    "entropy",
    "behaviour_weight_mean",
    "kl_to_reference",
    "proximal_error",
    "importance_weight_error",
    "ratio_error",
)
"""Reported as means over loss tokens; the errors are those of the approximation against a forward pass."""
NUM_SUMS, NUM_MAXIMA = len(SUMS) + len(_MORE_SUMS), len(MAXIMA)

Report = tuple[Tensor, Tensor]
"""([NUM_SUMS], [NUM_MAXIMA]) float64"""


class Objective:
    """The loss of one training step, by the configuration. Its only state is a clock."""

    def __init__(self, config: RunConfig, sum_over_ranks: Callable[[Tensor], Tensor] = lambda values: values) -> None:
        """`sum_over_ranks` adds up, differentiably, over the ranks that share the tokens of each sequence."""
        self._config = config
        self._sum_over_ranks = sum_over_ranks
        self._algorithm = config.algorithm
        self._loss_options = config.algorithm.loss_options()
        self.proximal_seconds = 0.0
        """Host seconds spent on the proximal policy so far"""

    @property
    def needs_recomputed_logprobs(self) -> bool:
        return self._config.proximal == "recompute" or self._algorithm.compare_with_recompute

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, microbatch: Microbatch, version: int, fresh_staleness: int = 0
    ) -> tuple[Tensor, Report]:
        """(sum of the losses of the tokens, report). `logprobs`, `entropy`: [tokens] float32 with graph.

        `fresh_staleness`, of tokens that `version` sampled, is 1 from the second optimizer step on a batch on: the
        weights have moved, and at 0 such a token would have no trust region.
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
        mask, algorithm = microbatch.loss_mask, self._algorithm
        more = {
            "entropy": torch.where(mask & entropy.isfinite(), entropy, 0.0).sum(),
            **self._weights(mask, staleness),
        }
        loss_sum = output.loss_sum
        if algorithm.entropy_coefficient > 0:
            loss_sum = loss_sum - algorithm.entropy_coefficient * more["entropy"]
        if microbatch.reference_logprobs is not None:
            more["kl_to_reference"] = self._kl(logprobs, microbatch.reference_logprobs, mask)
            loss_sum = loss_sum + algorithm.kl_coefficient * more["kl_to_reference"]
        if microbatch.recomputed_logprobs is not None:
            more |= _errors(logprobs.detach(), microbatch.behaviour_logprobs, p, microbatch.recomputed_logprobs, mask)
        zero = torch.zeros((), dtype=torch.float64, device=mask.device)
        sums = torch.stack([more.get(name, zero).detach().double() for name in _MORE_SUMS])
        return loss_sum, (torch.cat([output.sums, sums]), output.maxima)

    def metrics(self, sums: list[float], maxima: list[float]) -> dict[str, float]:
        """Readable metrics from the reports' totals over microbatches and ranks; what was not computed is left out."""
        metrics = summarize(sums[: len(SUMS)], maxima)
        tokens = max(metrics["loss_tokens"], 1.0)
        more = {name: value / tokens for name, value in zip(_MORE_SUMS, sums[len(SUMS) :], strict=True)}
        return metrics | {name: value for name, value in more.items() if self._computes(name)}

    def _computes(self, name: str) -> bool:
        if name == "behaviour_weight_mean":
            return self._config.proximal in proximal.INTERPOLATIONS
        if name == "kl_to_reference":
            return self._algorithm.kl_coefficient > 0
        return name == "entropy" or self.needs_recomputed_logprobs

    @contextmanager
    def counting_proximal_seconds(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.proximal_seconds += time.perf_counter() - start

    def _proximal(self, logprobs: Tensor, microbatch: Microbatch, staleness: Tensor) -> Tensor:
        """log pi_proximal, [tokens] float32 without gradient."""
        match self._config.proximal:
            case "recompute":
                assert microbatch.recomputed_logprobs is not None
                return microbatch.recomputed_logprobs
            case "reuse_target":
                return logprobs.detach()
            case "behaviour":
                return microbatch.behaviour_logprobs
            case interpolation:
                interpolate = proximal.INTERPOLATIONS[interpolation]
        schedule, anchor = self._algorithm.behaviour_weight, self._algorithm.fresh_anchor
        return interpolate(logprobs, microbatch.behaviour_logprobs, staleness, schedule, anchor)

    def _weights(self, mask: Tensor, staleness: Tensor) -> dict[str, Tensor]:
        if self._config.proximal not in proximal.INTERPOLATIONS:
            return {}
        schedule, anchor = self._algorithm.behaviour_weight, self._algorithm.fresh_anchor
        beta = proximal.behaviour_weight(torch.where(mask, staleness, 0), schedule, anchor)
        return {"behaviour_weight_mean": torch.where(mask, beta, 0.0).sum()}

    def _kl(self, logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
        used = mask & logprobs.isfinite() & reference_logprobs.isfinite()
        theta, reference = torch.where(used, logprobs, 0.0), torch.where(used, reference_logprobs, 0.0)
        return kl_to_reference(theta, reference, self._algorithm.kl_estimator).sum()


def _errors(theta: Tensor, b: Tensor, p: Tensor, recomputed: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far p, w and r are from those of decoupled PPO, summed over the loss tokens whose log-probs are finite."""

    def total(ours: Tensor, theirs: Tensor) -> Tensor:
        difference = (ours - theirs).abs()
        return torch.where(mask & difference.isfinite(), difference, 0.0).sum()

    return {
        "proximal_error": total(p, recomputed),
        "importance_weight_error": total(bounded_exp(p - b), bounded_exp(recomputed - b)),
        "ratio_error": total(bounded_exp(theta - p), bounded_exp(theta - recomputed)),
    }

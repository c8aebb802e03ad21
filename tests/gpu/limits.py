"""How far from Hugging Face in float32 the actor may be, and why."""

import dataclasses
import math

from tests.gpu.measure import Measurement


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """A mistake in a layout, a mask or a scale changes log-probs by about 1, and leaves no cosine above 0.9."""

    logprob_mean: float
    logprob_max: float
    cosine: float
    """lowest allowed, of the whole gradient"""
    worst_cosine: float
    """lowest allowed, of one tensor's gradient"""

    def check(self, measured: Measurement) -> None:
        assert measured.finite and measured.skipped_steps == 0
        assert measured.logprob_mean <= self.logprob_mean
        assert measured.logprob_max <= self.logprob_max
        if not math.isnan(measured.cosine):
            assert measured.cosine >= self.cosine
            assert measured.worst_cosine >= self.worst_cosine, measured.worst_tensor


# The weights are numbers of bf16, so only what is computed is rounded, by 2^-9 each time: some ten times in each of
# four layers, sqrt(40) * 2^-9 = 0.012 in hidden states and logits of order one. The mean over tokens of these very
# models on torch's CPU kernels is 0.009, the largest 0.04, the lowest cosine 0.999; the limits leave twice that.
_BF16 = Limits(logprob_mean=0.02, logprob_max=0.12, cosine=0.998, worst_cosine=0.99)
# A token whose second and third expert are as good as equal goes to another one: its log-probs jump (0.35 on the CPU),
# and so do the gradients of the two experts, which see a few tokens each (0.95).
_BF16_ROUTED = Limits(logprob_mean=0.04, logprob_max=1.0, cosine=0.97, worst_cosine=0.8)
# E4M3 rounds by 2^-4: with simulated rounding of the factors of every matrix product (a scale per tensor, or per 128 or
# 32 numbers), the dense model has means of 0.10, largest differences of 0.6, and cosines of 0.96 (0.94 for one tensor).
_FP8 = Limits(logprob_mean=0.25, logprob_max=1.5, cosine=0.9, worst_cosine=0.8)
LEAST_FP8_NOISE = 2.0
"""So many times noisier than in bf16 must log-probs be, to believe that they are computed in FP8; simulated: 11"""


def limits_of(family: str, precision: str) -> Limits:
    """For one of `models.FAMILIES`, but FP8 not where rounding decides about experts."""
    if precision == "fp8":
        assert family != "qwen3_moe", "use qwen3_moe_all"
        return _FP8
    return _BF16_ROUTED if family == "qwen3_moe" else _BF16

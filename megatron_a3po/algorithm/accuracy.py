"""Estimate how good a policy is from several responses to each prompt, with confidence intervals."""

import math
from collections.abc import Sequence

_Z = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution"""


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Return the chance that at least one of k responses is right, drawn without replacement from `num_samples`.

    For independent responses this is an unbiased estimate of pass@k (Chen et al. 2021, arXiv 2107.03374). Raises
    ValueError unless 1 <= k <= num_samples and 0 <= num_right <= num_samples.
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"pass@{k} of {num_right} right among {num_samples} responses")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean over prompts. `values`: one mean per prompt, at least one.

    The sample size is the number of prompts, because responses to one prompt are not independent. Values in [0, 1] get
    Wilson's interval. It assumes the largest variance that is possible with this mean, so it is rarely too narrow, and
    it has a width even if all values are equal. Other values get the normal interval with their own variance.
    """
    number, mean = len(values), math.fsum(values) / len(values)
    if all(0.0 <= value <= 1.0 for value in values):
        middle = (mean + _Z**2 / (2 * number)) / (1 + _Z**2 / number)
        width = _Z / (1 + _Z**2 / number) * math.sqrt(mean * (1 - mean) / number + _Z**2 / (4 * number**2))
        return max(0.0, middle - width), min(1.0, middle + width)
    if number == 1:
        return -math.inf, math.inf
    variance = math.fsum((value - mean) ** 2 for value in values) / (number - 1)
    return mean - _Z * math.sqrt(variance / number), mean + _Z * math.sqrt(variance / number)

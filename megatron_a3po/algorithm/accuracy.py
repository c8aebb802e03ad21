"""How good a policy is, from several responses to each of a few prompts, and how sure that is."""

import math
from collections.abc import Sequence

_Z = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution"""


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Chance that at least one is right among k of a prompt's `num_samples` responses, drawn without replacement.

    Over responses that are independent this is an unbiased estimate of pass@k (Chen et al. 2021, arXiv 2107.03374).
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"pass@{k} of {num_right} right among {num_samples} responses")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval for the mean over prompts like these. `values`: one mean per prompt, at least one.

    Responses to one prompt are not independent, so prompts count, not responses. Values in [0, 1] get Wilson's
    interval, which assumes the largest variance that they can have with this mean: rarely too narrow, and of some width
    even where all values are equal. Others get the normal one, with their own variance.
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

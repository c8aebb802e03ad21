"""Checks of the section `algorithm`, and notes on its keys that have no effect."""

from collections.abc import Iterator

from megatron_a3po.config.mistakes import Mistake
from megatron_a3po.config.schema import AlgorithmConfig, RunConfig

_GREEDY_BELOW = 1e-6
"""SGLang's _SAMPLING_EPS"""


def algorithm_mistakes(config: RunConfig) -> Iterator[Mistake]:
    """Yield a mistake if the sampling temperature is one that SGLang ignores."""
    if config.rollout.temperature < _GREEDY_BELOW:
        yield Mistake(
            "rollout.temperature",
            config.rollout.temperature,
            f"below {_GREEDY_BELOW:g}, SGLang decodes greedily and reports log-probs at temperature 1",
            f"use 1, or at least {_GREEDY_BELOW:g}",
        )


def idle_keys(config: RunConfig) -> Iterator[str]:
    """Yield a note for each key of `algorithm` that differs from its default and has no effect.

    These are not mistakes: such a key may come from a recipe whose `proximal` the command line has replaced, and the
    resolved configuration does not tell the two apart.
    """
    default = AlgorithmConfig()
    for keys, cause in _idle(config):
        for key in keys:
            value = getattr(config.algorithm, key)
            if value != getattr(default, key):
                yield f"note: algorithm.{key} = {value} has no effect with `{cause}`"


def _idle(config: RunConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (keys without effect, reason)."""
    proximal, algorithm = config.proximal, config.algorithm
    if proximal not in ("loglinear", "linear"):
        yield ("behaviour_weight", "fresh_anchor"), f"proximal: {proximal}"
    if proximal == "reuse_target":  # whose ratio is 1
        yield ("clip_epsilon_low", "clip_epsilon_high", "dual_clip"), "proximal: reuse_target"
    if proximal == "recompute":
        yield ("compare_with_recompute",), "proximal: recompute"
    if algorithm.weight_cap is None:
        yield ("weight_cap_mode", "weight_cap_level"), "algorithm.weight_cap: null"
    elif proximal == "behaviour" and algorithm.weight_cap >= 1:  # the weight is 1
        yield ("weight_cap", "weight_cap_mode", "weight_cap_level"), "proximal: behaviour"
    if algorithm.kl_coefficient == 0:
        yield ("kl_estimator",), "algorithm.kl_coefficient: 0"

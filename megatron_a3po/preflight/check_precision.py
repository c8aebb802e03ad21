"""Checks of `precision` and of the section `fp8` that do not depend on the model."""

from collections.abc import Iterator

from megatron_a3po.config.mistakes import Mistake
from megatron_a3po.config.schema import Fp8Config, RunConfig


def precision_mistakes(config: RunConfig) -> Iterator[Mistake]:
    """Yield mistakes in the precision that do not depend on the model."""
    if config.precision == "fp8":
        yield from _fp8(config)
        return
    if config.precision == "fp32" and config.device == "cuda" and config.parallel.context > 1:
        yield Mistake(
            "parallel.context",
            config.parallel.context,
            "Transformer Engine has no context parallelism in float32",
            "use 1, or `precision: bf16`",
            ("precision", "device"),
        )
    for key in Fp8Config.model_fields:
        value = getattr(config.fp8, key)
        if value != getattr(Fp8Config(), key):
            yield Mistake(
                f"fp8.{key}",
                value,
                f"has no effect with precision = {config.precision}",
                "set `precision: fp8`, or remove this key",
                ("precision",),
            )


def _fp8(config: RunConfig) -> Iterator[Mistake]:
    fp8 = config.fp8
    if config.device == "cpu":
        yield Mistake(
            "precision",
            "fp8",
            "needs Transformer Engine, which `device: cpu` does not have: Megatron would silently compute without FP8",
            "use `precision: bf16` or `precision: fp32`",
            ("device",),
        )
    if fp8.parameters and fp8.recipe == "blockwise" and config.parallel.tensor > 1:
        yield Mistake(
            "fp8.parameters",
            True,
            f"with fp8.recipe = blockwise and parallel.tensor = {config.parallel.tensor}, log-probs became NaN at "
            "the second step (NeMo-RL, issue 1164)",
            "set `fp8.parameters: false`, or `parallel.tensor: 1`, or another recipe",
            ("fp8.recipe", "parallel.tensor"),
        )
    if fp8.parameters and fp8.recipe == "delayed":
        yield Mistake(
            "fp8.parameters",
            True,
            "with fp8.recipe = delayed, the initial weights are rounded before any scale is known, by 3 to 9 % of "
            "their size",
            "set `fp8.parameters: false`, or another recipe",
            ("fp8.recipe",),
        )
    if fp8.parameters and config.algorithm.kl_coefficient > 0:
        yield Mistake(
            "fp8.parameters",
            True,
            f"algorithm.kl_coefficient = {config.algorithm.kl_coefficient} swaps the weights with those of the "
            "reference policy, and FP8 weights would not come back unchanged",
            "set `fp8.parameters: false`, or `algorithm.kl_coefficient: 0`",
            ("algorithm.kl_coefficient",),
        )
    if fp8.parameters and config.optimizer.offload:
        yield Mistake(
            "fp8.parameters",
            True,
            "with optimizer.offload = True, Megatron's optimizer on the host would have no parameters to update",
            "set `fp8.parameters: false`, or `optimizer.offload: false`",
            ("optimizer.offload",),
        )
    for key in ("bf16_layers_at_start", "bf16_layers_at_end"):
        if fp8.recipe == "delayed" and getattr(fp8, key) > 0:
            yield Mistake(
                f"fp8.{key}",
                getattr(fp8, key),
                "Megatron does not support bf16 layers with fp8.recipe = delayed",
                "use 0, or another recipe",
                ("fp8.recipe",),
            )

"""Translate `precision` into settings of Megatron's model and optimizer."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_a3po.config import Fp8Config
from megatron_a3po.errors import ConfigError

Precision = Literal["bf16", "fp32", "fp8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recipe:
    """The requirements of an FP8 recipe."""

    transformer_engine: tuple[int, int]
    """(major, minor) of the first version with it"""
    capabilities: tuple[tuple[int, int], tuple[int, int]]
    """(major, minor) of the first compute capability with it, and of the first one without it again"""
    format: Literal["e4m3", "hybrid"]
    """hybrid: gradients in e5m2, because one scale per tensor needs its range"""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        return self.capabilities[0] <= capability < self.capabilities[1]


_NO_END = (99, 0)
FP8_RECIPES = {
    "delayed": _Recipe(transformer_engine=(1, 0), capabilities=((8, 9), _NO_END), format="hybrid"),
    "tensorwise": _Recipe(transformer_engine=(2, 2), capabilities=((8, 9), _NO_END), format="hybrid"),
    "blockwise": _Recipe(transformer_engine=(2, 3), capabilities=((9, 0), (10, 0)), format="e4m3"),
    "mxfp8": _Recipe(transformer_engine=(2, 1), capabilities=((10, 0), _NO_END), format="e4m3"),
}


def parameter_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of the weights. Masters in the optimizer and accumulated gradients are float32 in any case."""
    return torch.float32 if precision == "fp32" else torch.bfloat16


def model_precision(precision: Precision, fp8: Fp8Config) -> dict[str, Any]:
    """Return the fields of Megatron's model configuration."""
    dtype = parameter_dtype(precision)
    settings: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": precision != "fp32",
        "fp16": False,
    }
    if precision != "fp8":
        return settings
    return settings | {
        "fp8": FP8_RECIPES[fp8.recipe].format,
        "fp8_recipe": fp8.recipe,
        "fp8_param": fp8.parameters,
        "first_last_layers_bf16": fp8.bf16_layers_at_start + fp8.bf16_layers_at_end > 0,
        "num_layers_at_start_in_bf16": fp8.bf16_layers_at_start,
        "num_layers_at_end_in_bf16": fp8.bf16_layers_at_end,
    }


def refuse_missing_fp8(
    fp8: Fp8Config, transformer_engine: tuple[int, int] | None, capability: tuple[int, int] | None
) -> None:
    """Raise ConfigError if Transformer Engine or the device cannot compute in FP8: Megatron would silently use bf16.

    `transformer_engine`: its version, None if it is not installed. `capability`: the CUDA device's, None without one.
    """
    if transformer_engine is None or capability is None:
        missing = "Transformer Engine is not installed" if transformer_engine is None else "there is no CUDA device"
        raise ConfigError(f"precision: fp8, but {missing}; use the GPU environment on a GPU, or precision: bf16")
    needed = FP8_RECIPES[fp8.recipe].transformer_engine
    if transformer_engine < needed:
        raise ConfigError(
            f"fp8.recipe: {fp8.recipe} needs Transformer Engine {_dotted(needed)}, installed is "
            f"{_dotted(transformer_engine)}; upgrade it, or use another recipe"
        )
    able = [name for name, other in FP8_RECIPES.items() if other.runs_on(capability)]
    if fp8.recipe not in able:
        raise ConfigError(
            f"fp8.recipe: {fp8.recipe} does not run on this device (compute capability {_dotted(capability)}); "
            f"use {' or '.join(able) or 'precision: bf16'}"
        )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"

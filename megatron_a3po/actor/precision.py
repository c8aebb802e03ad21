"""Numbers of the training side: what `precision` means for Megatron's model and optimizer."""

from typing import Any, Literal

import torch


def model_precision(precision: Literal["bf16", "fp32"]) -> dict[str, Any]:
    """Fields of Megatron's model configuration."""
    dtype = parameter_dtype(precision)
    return {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": precision == "bf16", "fp16": False}


def parameter_dtype(precision: Literal["bf16", "fp32"]) -> torch.dtype:
    """bf16 weights have float32 masters in the optimizer; gradients are accumulated in float32 in either case."""
    return torch.bfloat16 if precision == "bf16" else torch.float32

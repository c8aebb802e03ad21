"""Norms and linear layers on the CPU with the parameter names and checkpoint keys of Transformer Engine's modules."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megatron_a3po.errors import ConfigError


def normalize(hidden: Tensor, weight: Tensor, bias: Tensor | None, config: TransformerConfig, eps: float) -> Tensor:
    """Apply RMSNorm or LayerNorm over the last dimension, in at least float32.

    Args:
        hidden: [..., hidden], any floating dtype.
        weight, bias: [hidden]; with `layernorm_zero_centered_gamma` the factor is 1 + weight.

    Returns:
        [..., hidden], dtype of `hidden`.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    scale = weight.to(dtype) + 1 if config.layernorm_zero_centered_gamma else weight.to(dtype)
    if config.normalization == "RMSNorm":
        normalized = F.rms_norm(hidden.to(dtype), (hidden.shape[-1],), scale, eps)
    else:
        shift = None if bias is None else bias.to(dtype)
        normalized = F.layer_norm(hidden.to(dtype), (hidden.shape[-1],), scale, shift, eps)
    return normalized.to(hidden.dtype)


def norm_parameters(config: TransformerConfig, hidden_size: int) -> tuple[Parameter, Parameter | None]:
    """Make the weight [hidden] and, for LayerNorm only, the bias [hidden] in `params_dtype`, whole on every rank.

    Under sequence parallelism each rank sees only its part of the sequence. The attribute `sequence_parallel` tells
    Megatron to sum these gradients over the tensor-parallel group. Raises ConfigError for other norms.
    """
    if config.normalization not in ("RMSNorm", "LayerNorm"):
        raise ConfigError(f"device: cpu has RMSNorm and LayerNorm, not normalization={config.normalization!r}")
    initial = 0.0 if config.layernorm_zero_centered_gamma else 1.0
    weight = Parameter(torch.full((hidden_size,), initial, dtype=config.params_dtype))
    bias = None
    if config.normalization == "LayerNorm":
        bias = Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
    for parameter in (weight, bias):
        if parameter is not None:
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    return weight, bias


class CpuNorm(torch.nn.Module):
    """RMSNorm or LayerNorm, by the config. Megatron's own torch norm refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight, self.bias = norm_parameters(config, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., hidden] and keep its dtype."""
        return normalize(hidden, self.weight, self.bias, self.config, self.eps)


class CpuColumnParallelLinear(ColumnParallelLinear):
    """Megatron's own layer under a name of ours, by which megatron-bridge knows how it is sharded."""


class CpuLayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm and a column-parallel linear layer in one module, so that checkpoint keys are Transformer Engine's."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight, self.layer_norm_bias = norm_parameters(config, input_size)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Map [sequence (/ tp), batch, input] to ([sequence, batch, output / tp], bias or None)."""
        config: Any = self.config
        eps = config.layernorm_epsilon
        normalized = normalize(input_, self.layer_norm_weight, self.layer_norm_bias, config, eps)
        return super().forward(normalized, *args, **kwargs)


class CpuLinear(torch.nn.Linear):
    """Transformer Engine's linear with `parallel_mode="duplicated"`: every tensor-parallel rank has the same weight."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        parallel_mode: str | None = None,
        bias: bool = False,
        **unused: Any,
    ) -> None:
        if parallel_mode not in (None, "duplicated"):
            raise ConfigError(f"device: cpu has no linear layer with parallel_mode={parallel_mode!r}")
        super().__init__(input_size, output_size, bias=bias, dtype=config.params_dtype)
        init_method(self.weight.data)
        for parameter in self.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, input: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Map [..., input] to ([..., output], None); the second is a bias to add, as in Megatron's linear layers."""
        return super().forward(input), None

"""Put the CPU modules behind Megatron's `BackendSpecProvider`, in place of its Transformer Engine provider."""

import importlib
from functools import partial
from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

from megatron_a3po.cpu.attention import CpuDotProductAttention
from megatron_a3po.cpu.experts import CpuColumnParallelGroupedLinear, CpuRowParallelGroupedLinear
from megatron_a3po.cpu.modules import (
    CpuColumnParallelLinear,
    CpuLayerNormColumnParallelLinear,
    CpuLinear,
    CpuNorm,
)

# How the weights of each class are sharded over tensor-parallel ranks, in megatron-bridge's words.
PARALLELISM_OF_MODULES: dict[type, str] = {
    CpuNorm: "replicated",
    CpuLinear: "replicated",
    CpuColumnParallelLinear: "column",
    CpuLayerNormColumnParallelLinear: "column",
    CpuColumnParallelGroupedLinear: "column",
    CpuRowParallelGroupedLinear: "row",
    CpuDotProductAttention: "column",  # its sinks
}


class CpuSpecProvider(BackendSpecProvider):
    """The modules of a layer spec, structured like Megatron's `TESpecProvider`."""

    def linear(self) -> type:
        return CpuLinear

    def column_parallel_linear(self) -> type:
        return CpuColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return CpuLayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type[CpuNorm]:
        return CpuNorm

    def core_attention(self) -> type:
        return CpuDotProductAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> partial[TEGroupedMLP]:
        # Group them even if separate modules are requested: both have the same checkpoint keys and speed here.
        submodules = GroupedMLPSubmodules(CpuColumnParallelGroupedLinear, CpuRowParallelGroupedLinear)
        return partial(TEGroupedMLP, submodules=submodules)

    def activation_func(self) -> None:
        return None


def install() -> None:
    """Make Megatron's layer specs build the CPU modules in place of Transformer Engine's.

    Raises RuntimeError if Megatron is not the version that is expected.
    """

    def replace(module_name: str, **attributes: Any) -> None:
        module = importlib.import_module(f"megatron.core.{module_name}")
        for name, value in attributes.items():
            if not hasattr(module, name):
                raise RuntimeError(f"megatron.core.{module_name} has no {name}: this is not Megatron-Core 0.19")
            setattr(module, name, value)

    # Start with the provider's home, from which modules that are imported later take it.
    replace("extensions.transformer_engine_spec_provider", TESpecProvider=CpuSpecProvider)
    replace("models.gpt.gpt_layer_specs", TESpecProvider=CpuSpecProvider, TENorm=CpuNorm)
    replace("models.gpt.moe_module_specs", TESpecProvider=CpuSpecProvider)
    replace("transformer.transformer_block", LayerNormImpl=CpuNorm)
    # For its down projections, multi-latent attention accepts only the class that it knows by this name.
    replace("transformer.multi_latent_attention", TELinear=CpuLinear)

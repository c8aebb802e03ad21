"""The experts' linear layers on the CPU, in place of Transformer Engine's grouped linears."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.extensions.transformer_engine import _set_expert_parameter_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Parameter

from megatron_a3po.errors import ConfigError


class CpuGroupedLinear(torch.nn.Module):
    """One linear layer for each expert of this rank, with parameters `weight{i}` and, if `bias`, `bias{i}`.

    Weights are [output, input] in `params_dtype`, biases [output]. The attribute `allreduce` tells Megatron to sum
    gradients over the ranks that hold the same experts.
    """

    parallel_mode: Literal["column", "row"]

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__()
        if pg_collection.expt_tp.size() > 1:
            raise ConfigError(
                f"device: cpu has no experts with expert_tensor_parallel_size={pg_collection.expt_tp.size()}: gloo "
                "cannot gather uneven numbers of tokens; use 1 and spread whole experts by expert parallelism"
            )
        self.num_experts, self.use_bias, self.skip_bias_add = num_experts, bias, skip_bias_add
        self.groups = pg_collection
        for i in range(num_experts):
            weight = Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(weight.data)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                self.register_parameter(f"bias{i}", Parameter(torch.zeros(output_size, dtype=config.params_dtype)))
        own_groups = config.expert_model_parallel_size > 1 or (
            config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        _set_expert_parameter_attributes(self, self.parallel_mode, own_groups)

    def forward(self, tokens: Tensor, num_tokens: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Apply each expert to its tokens.

        Args:
            tokens: [tokens, input], ordered by expert.
            num_tokens: number of tokens of each expert, which may be 0.

        Returns:
            [tokens, output], and the experts' biases if the caller has to add them.
        """
        weights, biases = self._parameters_named("weight"), self._parameters_named("bias")
        added = biases if self.use_bias and not self.skip_bias_add else [None] * self.num_experts
        parts = zip(tokens.split(num_tokens), weights, added, strict=True)
        output = torch.cat([F.linear(part, weight, bias) for part, weight, bias in parts])
        return output, biases if self.use_bias and self.skip_bias_add else None

    def _parameters_named(self, kind: str) -> list[Any]:
        return [getattr(self, f"{kind}{i}", None) for i in range(self.num_experts)]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Transformer Engine's keys. `weight` is sharded over all experts, so that any layout can load it."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        single = metadata.get("singleton_local_shards", False)
        first = self.groups.ep.rank() * self.num_experts
        total = self.groups.ep.size() * self.num_experts
        axis = 0 if self.parallel_mode == "column" else 1
        axes = {"weight": axis} | ({"bias": 0} if self.parallel_mode == "column" else {})
        result: dict[str, Any] = {}
        for i in range(self.num_experts):
            local = {kind: getattr(self, f"{kind}{i}") for kind in ("weight", "bias") if hasattr(self, f"{kind}{i}")}
            offsets = sharded_offsets if single else (*sharded_offsets, (len(sharded_offsets), first + i, total))
            tensors = make_sharded_tensors_for_checkpoint(
                local,
                "",
                axes,
                offsets,
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(tensors, "", f"{first + i}.{prefix}" if single else prefix)
            for kind in local:
                tensor = tensors[kind]
                tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
                result[f"{prefix}{kind}{i}"] = tensor
        return result


class CpuColumnParallelGroupedLinear(CpuGroupedLinear):
    """The first layers of experts (gate and up)."""

    parallel_mode = "column"


class CpuRowParallelGroupedLinear(CpuGroupedLinear):
    """The second layers of experts (down)."""

    parallel_mode = "row"

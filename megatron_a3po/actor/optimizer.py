"""Megatron's distributed optimizer."""

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from megatron_a3po.actor.precision import parameter_dtype
from megatron_a3po.config import OptimizerConfig


def build_optimizer(config: OptimizerConfig, precision: Any, chunks: list[torch.nn.Module]) -> Any:
    """AdamW over the chunks' float32 gradients, its state sharded over the data-parallel ranks."""
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad_norm,
        bf16=precision == "bf16",
        fp16=False,
        params_dtype=parameter_dtype(precision),
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(settings, chunks)

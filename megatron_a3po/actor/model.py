"""The policy as a Megatron-Core model, built and filled by megatron-bridge from a Hugging Face folder."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config

from megatron_a3po.actor.precision import model_precision, parameter_dtype
from megatron_a3po.config import ParallelConfig

_VOCAB_MULTIPLE = 64
"""The vocabulary of every tensor-parallel rank is padded to a multiple of this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyModel:
    """This rank's part of the policy, with what is needed to run it and to read it."""

    chunks: list[torch.nn.Module]
    """Megatron's DDP-wrapped model chunks of this pipeline stage"""
    bridge: Any
    """megatron-bridge's AutoBridge: names and layouts between Hugging Face and Megatron"""
    groups: ProcessGroupCollection
    vocab_size: int
    """of the Hugging Face model, without padding"""
    padded_vocab_size: int
    """over all tensor-parallel ranks"""


def build_model(
    folder: Path, parallel: ParallelConfig, precision: Any, *, seed: int, timeout_seconds: float
) -> PolicyModel:
    """Collective over all ranks; the default process group must exist. `folder`: config.json and safetensors."""
    parallel_state.initialize_model_parallel(
        parallel.tensor, parallel.pipeline, distributed_timeout_minutes=math.ceil(timeout_seconds / 60)
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)

    bridge = AutoBridge.from_hf_pretrained(str(folder.resolve()), torch_dtype=parameter_dtype(precision))
    provider = bridge.to_megatron_provider(load_weights=False)
    for name, value in _provider_settings(parallel, precision).items():
        if not hasattr(provider, name):
            raise AttributeError(f"megatron-bridge's {type(provider).__name__} has no setting {name!r}")
        setattr(provider, name, value)
    provider.finalize()
    provider._pg_collection = groups

    chunks = provider.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, average_in_collective=False
        ),
        wrap_with_ddp=True,
        use_cpu_initialization=True,
        pg_collection=groups,
        **({} if precision == "bf16" else {"mixed_precision_wrapper": None}),
    )
    bridge.load_hf_weights(chunks)

    model_config = get_model_config(chunks[0])
    model_config.finalize_model_grads_func = finalize_model_grads
    vocab_size = bridge.hf_pretrained.config.vocab_size
    return PolicyModel(
        chunks=chunks,
        bridge=bridge,
        groups=groups,
        vocab_size=vocab_size,
        padded_vocab_size=calculate_padded_vocab_size(vocab_size, _vocab_multiple(parallel), parallel.tensor),
    )


def _provider_settings(parallel: ParallelConfig, precision: Any) -> dict[str, Any]:
    return {
        **model_precision(precision),
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "sequence_parallel": parallel.tensor > 1,
        # Packed microbatches differ in length; Megatron accepts that only with this dispatcher, also without experts.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # The loss is a sum over tokens, divided once by the tokens of the whole batch. DDP reads it when it is built.
        "calculate_per_token_loss": True,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": _vocab_multiple(parallel),
        "use_cpu_initialization": True,
        # megatron-bridge turns it on wherever TE imports, but ColumnParallelLinear then demands apex's extension.
        "gradient_accumulation_fusion": False,
        # RL compares log-probs with a server's: no kernel that computes the cross entropy in bf16.
        "cross_entropy_loss_fusion": False,
    }


def _vocab_multiple(parallel: ParallelConfig) -> int:
    # On one rank megatron-bridge loads the vocabulary as it is, and refuses a padded one.
    return _VOCAB_MULTIPLE if parallel.tensor > 1 else 1

"""Build the policy as a Megatron-Core model from a config.json, by megatron-bridge, and load its weights."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config

from megatron_a3po.actor.fusions import Fusions
from megatron_a3po.actor.precision import model_precision, parameter_dtype
from megatron_a3po.actor.start_weights import load_start_weights, open_bridge
from megatron_a3po.config import RunConfig
from megatron_a3po.preflight.load import load_architecture
from megatron_a3po.preflight.memory import VOCAB_MULTIPLE


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyModel:
    """This rank's part of the policy, with what is needed to run and to export it."""

    chunks: list[torch.nn.Module]
    """Megatron's DDP-wrapped model chunks of this pipeline stage"""
    bridge: Any
    """megatron-bridge's AutoBridge, which maps names and layouts between Hugging Face and Megatron"""
    groups: ProcessGroupCollection
    vocab_size: int
    """vocabulary of the Hugging Face model, without padding"""


def build_model(config: RunConfig, fusions: Fusions) -> PolicyModel:
    """Build this rank's part of the policy and load the weights of the folder `config.model`.

    Collective over all ranks; the default process group must exist. Raises CheckpointError for damaged weights.
    """
    groups, bridge, provider = _describe(config, fusions)
    chunks = _build(config, provider, groups, with_gradients=True)
    load_start_weights(chunks, bridge, groups, config.model)

    model_config = get_model_config(chunks[0])
    model_config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    if config.parallel.overlap:
        # Reduce gradients only while the last microbatch runs backward.
        waiting = [chunk.no_sync for chunk in chunks]
        model_config.no_sync_func = waiting if len(waiting) > 1 else waiting[0]
    vocab_size = load_architecture(config.model).vocab_size
    return PolicyModel(chunks=chunks, bridge=bridge, groups=groups, vocab_size=vocab_size)


def build_untrained(config: RunConfig, fusions: Fusions) -> tuple[list[torch.nn.Module], ProcessGroupCollection]:
    """Build the chunks without weights and without DDP's memory for gradients. Collective over all ranks."""
    groups, _, provider = _describe(config, fusions)
    return _build(config, provider, groups, with_gradients=False), groups


def _describe(config: RunConfig, fusions: Fusions) -> tuple[ProcessGroupCollection, Any, Any]:
    """Return the groups, megatron-bridge's AutoBridge, and its provider with the settings of this run."""
    groups = _initialize_parallel_groups(config)
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed)

    bridge = open_bridge(config.model.resolve(), parameter_dtype(config.precision))
    provider = bridge.to_megatron_provider(load_weights=False)
    settings = _provider_settings(config, fusions)
    if provider.num_moe_experts:
        settings |= _EXPERT_SETTINGS
    for name, value in settings.items():
        if not hasattr(provider, name):
            raise AttributeError(f"megatron-bridge's {type(provider).__name__} has no setting {name!r}")
        setattr(provider, name, value)
    for name, value in _YARN_DEFAULTS.items():
        if getattr(provider, name, value) is None:
            setattr(provider, name, value)
    provider.finalize()
    provider._pg_collection = groups
    return groups, bridge, provider


def _build(
    config: RunConfig, provider: Any, groups: ProcessGroupCollection, *, with_gradients: bool
) -> list[torch.nn.Module]:
    chunks: list[torch.nn.Module] = provider.provide_distributed_model(
        ddp_config=_ddp_config(config),
        wrap_with_ddp=with_gradients,
        use_cpu_initialization=config.device == "cpu",
        pg_collection=groups,
        **({"mixed_precision_wrapper": None} if config.precision == "fp32" else {}),
    )
    return chunks


def _initialize_parallel_groups(config: RunConfig) -> ProcessGroupCollection:
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=math.ceil(config.actor.collective_timeout_seconds / 60),
        create_gloo_process_groups=False,
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def _ddp_config(config: RunConfig) -> DistributedDataParallelConfig:
    overlap = config.parallel.overlap
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        average_in_collective=False,
        overlap_grad_reduce=overlap,
        # Weights are published after the last step of a batch, so only earlier steps can gather them later.
        overlap_param_gather=overlap and config.actor.minibatches > 1,
        fp8_param_gather=config.precision == "fp8" and config.fp8.parameters,
    )


def _provider_settings(config: RunConfig, fusions: Fusions) -> dict[str, Any]:
    parallel = config.parallel
    return {
        **model_precision(config.precision, config.fp8),
        **_recompute_settings(config.actor.activation_recompute),
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        # Megatron matches the sends and receives of a batch by order alone, so that two interleaved stages would
        # mistake activations for gradients. Interleaved stages exchange them one by one, which also overlaps them.
        "overlap_p2p_comm": parallel.virtual_pipeline > 1,
        "batch_p2p_comm": parallel.virtual_pipeline == 1,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": parallel.tensor > 1,
        # Packed microbatches differ in length. Megatron accepts that only with this dispatcher, even without experts.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # The loss is a sum over tokens, divided once by the tokens of the whole batch. DDP reads this when it is built.
        "calculate_per_token_loss": True,
        # The policy's loss does not use layers for multi-token prediction.
        "mtp_num_layers": None,
        "should_pad_vocab": True,
        # On one rank, megatron-bridge refuses a padded vocabulary.
        "make_vocab_size_divisible_by": VOCAB_MULTIPLE if parallel.tensor > 1 else 1,
        "use_cpu_initialization": config.device == "cpu",
        # All weights are loaded right afterwards.
        "perform_initialization": False,
        "gradient_accumulation_fusion": fusions.gradient_accumulation,
        # Log-probs of a policy are computed without dropout.
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # No kernel may compute the cross entropy in bf16: log-probs are compared with a server's.
        "cross_entropy_loss_fusion": False,
        **({} if fusions.transformer_engine else _WITHOUT_TRANSFORMER_ENGINE),
    }


_WITHOUT_TRANSFORMER_ENGINE: dict[str, Any] = {
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
}
"""Settings that some providers of megatron-bridge turn on, but that Megatron refuses without Transformer Engine"""


_YARN_DEFAULTS = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": True}
"""Hugging Face's defaults for keys that a config.json lacks; megatron-bridge leaves them None."""

_EXPERT_SETTINGS: dict[str, Any] = {
    # Only the policy's objective counts: no auxiliary loss, and no update of the router's bias between two steps.
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_dtype": "fp32",
}


def _recompute_settings(what: Literal["none", "selective", "full"]) -> dict[str, Any]:
    if what == "none":
        return {"recompute_granularity": None}
    if what == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

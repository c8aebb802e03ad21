"""Random tiny models of the supported families as Hugging Face folders, for tests that need a model, not its skills."""

from pathlib import Path
from typing import Any

VOCAB_SIZE = 259
"""Not divisible by the tensor-parallel size, so that the vocabulary is padded."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LLAMA3_ROPE = {  # the constants that Megatron has for Llama 3
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN_YARN = {  # as in its model card, without the constants that Hugging Face has defaults for
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
_DEEPSEEK_EXPERTS = {  # the names of DeepSeek's configuration, which GLM shares
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {"rope_parameters": _ROPE}),
    "qwen3": ("Qwen3Config", {"rope_parameters": _ROPE}),
    "qwen3_tied": ("Qwen3Config", {"rope_parameters": _ROPE, "tie_word_embeddings": True}),
    "qwen3_mqa": ("Qwen3Config", {"rope_parameters": _ROPE, "num_key_value_heads": 1}),
    "qwen3_yarn": ("Qwen3Config", {"rope_parameters": _QWEN_YARN}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE, "max_position_embeddings": 131072}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "rope_parameters": _ROPE,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        _DEEPSEEK_EXPERTS
        | {
            "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        _DEEPSEEK_EXPERTS
        | {
            "rope_parameters": _DEEPSEEK_ROPE,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "n_group": 2,
            "topk_group": 1,
            # Twice topk_group, as in DeepSeek-V3: otherwise Megatron ranks the groups by another number of experts.
            "num_experts_per_tok": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "num_nextn_predict_layers": 0,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "max_position_embeddings": 131072,  # the 32 x 4096 that megatron-bridge assumes
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}

FAMILIES = tuple(_FAMILIES)


def save_tiny_model(family: str, folder: Path) -> None:
    """Write config.json and model.safetensors (float32, the same at every call) of one of `FAMILIES` into `folder`.

    All weights are random and large enough that every layer, bias and norm matters to the logits, which are of order
    one; norms lie around 1.
    """
    import torch
    import transformers

    config_class, settings = _FAMILIES[family]
    config = getattr(transformers, config_class)(**_SHAPE | settings, dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.1)
    model.save_pretrained(folder)

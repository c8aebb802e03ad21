"""Tiny models in the shapes that a GPU's fused kernels want, as Hugging Face folders."""

from pathlib import Path
from typing import Any

VOCAB_SIZE = 1000
"""Not divisible by the tensor-parallel size times 64, so that the vocabulary is padded."""

# Multiples of 128, as blockwise FP8 wants, also on each of two tensor-parallel ranks; heads as flash attention wants.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS),
    # Rounding cannot send a token to another expert, so log-probs and gradients stay as close as those of dense layers.
    "qwen3_moe_all": ("Qwen3MoeConfig", _EXPERTS | {"num_experts_per_tok": 8}),
}


def save_model(family: str, folder: Path) -> None:
    """Random weights, the same at every call, all of them numbers of bf16: loading them in bf16 loses nothing.

    Large enough that every layer matters to the logits, which are of order one; norms lie around 1.
    """
    import torch
    import transformers

    config_class, settings = FAMILIES[family]
    config = getattr(transformers, config_class)(**_SHAPE | settings, dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.05)
                parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)

"""Variants of the supported architectures that megatron-bridge would silently build as something else."""

from collections.abc import Iterator
from typing import Any

from megatron_a3po.preflight.families import architecture_name

_BUILT: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"use_sliding_window": False},
    "Qwen3ForCausalLM": {"attention_bias": False, "use_sliding_window": False},
    "LlamaForCausalLM": {"attention_bias": False, "mlp_bias": False},
    "Qwen3MoeForCausalLM": {
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "Glm4MoeForCausalLM": {"n_shared_experts": 1, "norm_topk_prob": True, "tie_word_embeddings": False},
    "DeepseekV3ForCausalLM": {
        "attention_bias": False,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,  # that of the low-rank norms, whatever the others have
        "rope_interleave": True,
        "tie_word_embeddings": False,
    },
    "GptOssForCausalLM": {"attention_bias": True, "swiglu_limit": 7.0, "tie_word_embeddings": False},
}
"""The only values that megatron-bridge 0.6.2 builds and maps; it ignores other values of these fields."""

_ROTARY: dict[str, tuple[str, ...]] = {
    "LlamaForCausalLM": ("default", "linear", "llama3"),
    "Glm4MoeForCausalLM": ("default",),
    "GptOssForCausalLM": ("yarn",),
}
_ROTARY_OTHERWISE = ("default", "yarn")
_ROTARY_CONSTANTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "GptOssForCausalLM": {
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
"""Constants of scaled rotary embeddings that megatron-bridge does not read from config.json"""


def unbuilt_variants(described: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (field, value, what is built instead) for the config.json of a supported architecture."""
    name = architecture_name(described)
    for field, built in (_BUILT[name] | {"hidden_act": "silu"}).items():
        value = described.get(field)
        if value is not None and value != built:
            yield field, value, repr(built)
    rotary = described.get("rope_parameters") or described.get("rope_scaling")
    if isinstance(rotary, dict):
        yield from _rotary(name, rotary)
    if name == "Glm4MoeForCausalLM":
        share = described.get("partial_rotary_factor") or (rotary or {}).get("partial_rotary_factor")
        if share is not None and share != 0.5:
            yield "partial_rotary_factor", share, "0.5"
    if name == "DeepseekV3ForCausalLM" and "q_lora_rank" in described and described["q_lora_rank"] is None:
        yield "q_lora_rank", None, "a low-rank query, which the model does not have,"
    if described.get("num_experts_per_tok") == 1:
        yield "num_experts_per_tok", 1, "a router for at least 2"
    yield from _groups_of_experts(described)
    # megatron-bridge tells by their shape alone whether the weights of experts are stored transposed.
    if name == "GptOssForCausalLM" and described.get("hidden_size") == 2 * described.get("intermediate_size", 0):
        yield "hidden_size", described["hidden_size"], "other than twice intermediate_size"
    kinds = described.get("layer_types")
    if name == "GptOssForCausalLM" and isinstance(kinds, list):
        alternating = ["sliding_attention", "full_attention"] * len(kinds)
        if kinds != alternating[: len(kinds)]:
            yield "layer_types", kinds, "sliding and full attention in turn"


def _rotary(name: str, rotary: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    kind, kinds = rotary.get("rope_type") or rotary.get("type"), _ROTARY.get(name, _ROTARY_OTHERWISE)
    if kind is not None and kind not in kinds:
        yield "rope_type", kind, " or ".join(map(repr, kinds))
    elif rotary.get("attention_factor") is not None:
        yield "attention_factor", rotary["attention_factor"], "the one that follows from `factor`"
    elif kind in ("llama3", "yarn"):
        for field, built in _ROTARY_CONSTANTS.get(name, {}).items():
            value = rotary.get(field)
            if value is not None and value != built:
                yield field, value, repr(built)


def _groups_of_experts(described: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Check group-limited routing.

    Hugging Face ranks groups by their two best experts, Megatron by as many as a token takes from each group.
    """
    groups, chosen, per_token = (described.get(field, 0) for field in ("n_group", "topk_group", "num_experts_per_tok"))
    if any(type(number) is not int or number < 1 for number in (groups, chosen, per_token)):
        return
    if chosen < groups and per_token // chosen != 2:
        yield "num_experts_per_tok", per_token, f"{2 * chosen}, twice topk_group,"

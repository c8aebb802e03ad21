"""What megatron-bridge builds otherwise than config.json says is known; published models are not among it."""

import json
from typing import Any

import pytest
import transformers

from megatron_a3po.preflight.families import SUPPORTED_ARCHITECTURES
from megatron_a3po.preflight.variants import unbuilt_variants

FAMILIES = [name.removesuffix("ForCausalLM") for name in SUPPORTED_ARCHITECTURES]
LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def variants(family: str, **fields: Any) -> list[tuple[str, Any, str]]:
    return list(unbuilt_variants({"architectures": [f"{family}ForCausalLM"]} | fields))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_builds_by_default_is_built(family: str) -> None:
    assert variants(family) == []
    assert variants(family, **json.loads(getattr(transformers, f"{family}Config")().to_json_string())) == []


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Llama", {"rope_scaling": LLAMA_3_1}),
        ("Llama", {"rope_scaling": LLAMA_3_1 | {"factor": 32.0}}),
        ("Qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 131072}),
        ("Glm4Moe", {"attention_bias": True, "use_qk_norm": True, "n_group": 1, "topk_group": 1}),
        ("DeepseekV3", {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "rope_scaling": {"type": "yarn"}}),
    ],
)
def test_published_variants_are_built(family: str, fields: dict[str, Any]) -> None:
    assert variants(family, **fields) == []


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("Qwen2", {"use_sliding_window": True}, ("use_sliding_window", True, "False")),
        ("Qwen3", {"hidden_act": "gelu"}, ("hidden_act", "gelu", "'silu'")),
        ("Qwen3", {"rope_scaling": {"type": "dynamic"}}, ("rope_type", "dynamic", "'default' or 'yarn'")),
        ("Llama", {"mlp_bias": True}, ("mlp_bias", True, "False")),
        ("Llama", {"rope_parameters": LLAMA_3_1 | {"low_freq_factor": 2.0}}, ("low_freq_factor", 2.0, "1.0")),
        ("Qwen3Moe", {"decoder_sparse_step": 2}, ("decoder_sparse_step", 2, "1")),
        (
            "GptOss",
            {"hidden_size": 64, "intermediate_size": 32},
            ("hidden_size", 64, "other than twice intermediate_size"),
        ),
        ("Qwen3Moe", {"mlp_only_layers": [0]}, ("mlp_only_layers", [0], "[]")),
        ("Glm4Moe", {"n_shared_experts": 2}, ("n_shared_experts", 2, "1")),
        (
            "DeepseekV3",
            {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 4},
            ("num_experts_per_tok", 4, "8, twice topk_group,"),
        ),
        (
            "GptOss",
            {"layer_types": ["full_attention", "sliding_attention"]},
            ("layer_types", ["full_attention", "sliding_attention"], "sliding and full attention in turn"),
        ),
        ("GptOss", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, ("factor", 8.0, "32.0")),
    ],
)
def test_a_variant_that_is_built_otherwise_is_named_with_what_would_be_built(
    family: str, fields: dict[str, Any], expected: tuple[str, Any, str]
) -> None:
    assert variants(family, **fields) == [expected]

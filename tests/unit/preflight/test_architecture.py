"""A config.json is read into sizes that agree with Hugging Face's own model, and its FLOPs with a counter's."""

import dataclasses
import json
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from megatron_a3po.errors import ConfigError
from megatron_a3po.preflight.architecture import Architecture
from megatron_a3po.preflight.families import SUPPORTED_ARCHITECTURES, OddFields, read_architecture

TINY: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "max_position_embeddings": 64,
}
TINY_EXPERTS: dict[str, Any] = TINY | {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
TINY_LATENT: dict[str, Any] = TINY_EXPERTS | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
TINY_GPT_OSS = TINY | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "head_dim": 8}

TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", TINY),
    "qwen2-tied": ("Qwen2", TINY | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", TINY | {"head_dim": 8}),
    "qwen3-bias": ("Qwen3", TINY | {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-default-head": ("Qwen3", TINY),
    "llama": ("Llama", TINY),
    "llama-biases": ("Llama", TINY | {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "llama-heads": ("Llama", {key: value for key, value in TINY.items() if key != "num_key_value_heads"}),
    "qwen3-moe": ("Qwen3Moe", TINY_EXPERTS | {"num_experts": 4}),
    "qwen3-moe-sparse": ("Qwen3Moe", TINY_EXPERTS | {"num_experts": 4, "decoder_sparse_step": 2, "head_dim": 8}),
    "qwen3-moe-dense": ("Qwen3Moe", TINY_EXPERTS | {"num_experts": 4, "mlp_only_layers": [0, 2]}),
    "glm4-moe": ("Glm4Moe", TINY_EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 8}),
    "glm4-moe-all": (
        "Glm4Moe",
        TINY_EXPERTS
        | {"n_routed_experts": 4, "n_shared_experts": 2, "use_qk_norm": True, "attention_bias": True}
        | {"first_k_dense_replace": 0},
    ),
    "deepseek-v3": ("DeepseekV3", TINY_LATENT | {"n_shared_experts": 2}),
    "deepseek-v3-direct-queries": ("DeepseekV3", TINY_LATENT | {"q_lora_rank": None, "attention_bias": True}),
    "gpt-oss": ("GptOss", TINY_GPT_OSS),
    "gpt-oss-no-bias": ("GptOss", TINY_GPT_OSS | {"attention_bias": False, "layer_types": ["full_attention"] * 3}),
}

_QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "Qwen3-8B": (
        "Qwen3",
        _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
        8_190_735_360,
    ),
    "Qwen2.5-1.5B": (
        "Qwen2",
        {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
        | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
        | {"max_position_embeddings": 131072},
        1_543_714_304,
    ),
    "Llama-3.1-70B": (
        "Llama",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072},
        70_553_706_496,
    ),
    "Qwen3-30B-A3B": (
        "Qwen3Moe",
        _QWEN3
        | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
        | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        30_532_122_624,
    ),
    "GLM-4.5-Air": (
        "Glm4Moe",
        {"hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96}
        | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "attention_bias": True}
        | {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
        | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "max_position_embeddings": 131072},
        106_852_245_504,
    ),
    "DeepSeek-V3": (
        "DeepseekV3",
        {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128}
        | {"num_key_value_heads": 128, "vocab_size": 129280, "kv_lora_rank": 512, "q_lora_rank": 1536}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256}
        | {"n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
        | {"first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "max_position_embeddings": 163840},
        671_026_404_352,
    ),
    "gpt-oss-20b": (
        "GptOss",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_local_experts": 32}
        | {"num_experts_per_tok": 4, "max_position_embeddings": 131072, "sliding_window": 128},
        20_914_757_184,
    ),
}


def described(family: str, sizes: dict[str, Any]) -> dict[str, Any]:
    return sizes | {"architectures": [f"{family}ForCausalLM"]}


def hugging_face(family: str, sizes: dict[str, Any], device: str) -> Any:
    config = getattr(transformers, f"{family}Config")(
        **sizes, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.device(device):
        return getattr(transformers, f"{family}ForCausalLM")(config)


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if ".mtp" not in name)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_parameters_are_those_of_the_hugging_face_model(name: str) -> None:
    family, sizes = TINY_MODELS[name]

    assert read_architecture(described(family, sizes)).num_parameters == num_parameters(
        hugging_face(family, sizes, "meta")
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models_are_those_of_the_hugging_face_model(name: str) -> None:
    family, sizes, expected = PUBLISHED[name]
    architecture = read_architecture(described(family, sizes))

    assert architecture.num_parameters == num_parameters(hugging_face(family, sizes, "meta")) == expected


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_config_json_that_transformers_wrote_is_read_alike(name: str) -> None:
    family, sizes = TINY_MODELS[name]
    written = json.loads(getattr(transformers, f"{family}Config")(**sizes).to_json_string())

    assert read_architecture(described(family, written)) == dataclasses.replace(
        read_architecture(described(family, sizes)), mtp_layers=written.get("num_nextn_predict_layers", 0)
    )


def uncaused(architecture: Architecture, length: int) -> int:
    """The part of the attention that a causal kernel leaves out, and an eager one computes and masks."""
    latent = architecture.latent
    per_pair = 2 * architecture.head_dim if latent is None else latent.nope_dim + latent.rope_dim + latent.value_dim
    seen = [sum(min(index + 1, window or length) for index in range(length)) for window in architecture.windows]
    return sum(2 * architecture.num_heads * per_pair * (length * length - pairs) for pairs in seen)


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_forward_flops_are_those_that_a_counter_sees_less_the_masked_half(name: str, length: int) -> None:
    family, sizes = TINY_MODELS[name]
    model = hugging_face(family, sizes, "cpu")
    architecture = read_architecture(described(family, sizes))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(length)[None], use_cache=False)
    by_module = counter.get_flop_counts()
    positions = sum(sum(by_module[module].values()) for module in by_module if module.endswith("rotary_emb"))

    assert architecture.forward_flops(length) == counter.get_total_flops() - positions - uncaused(architecture, length)


def test_long_sequences_cost_more_per_token_and_a_window_bounds_it() -> None:
    dense = read_architecture(described(*TINY_MODELS["qwen3"]))
    windowed = dataclasses.replace(dense, windows=(16,) * 3)
    per_token = [dense.forward_flops(length) / length for length in (1, 100, 10_000)]

    assert per_token == sorted(per_token) and dense.forward_flops(16) == windowed.forward_flops(16)
    assert windowed.forward_flops(10_000) / 10_000 < 1.01 * windowed.forward_flops(1_000) / 1_000


def test_all_odd_fields_are_named_at_once() -> None:
    sizes = TINY_EXPERTS | {"hidden_size": "24", "vocab_size": True, "num_hidden_layers": 0, "mlp_only_layers": [0.5]}
    with pytest.raises(OddFields) as error:
        read_architecture(described("Qwen3Moe", sizes | {"tie_word_embeddings": 1}))

    assert set(error.value.fields) == {
        *("hidden_size", "vocab_size", "num_hidden_layers", "mlp_only_layers", "tie_word_embeddings", "num_experts")
    }


@pytest.mark.parametrize("architectures", [None, [], ["GPT2LMHeadModel"], "GPT2LMHeadModel", 3])
def test_an_unknown_architecture_is_refused_with_those_that_are_known(architectures: object) -> None:
    with pytest.raises(ConfigError, match="is not supported; use one of Qwen2ForCausalLM, Qwen3ForCausalLM"):
        read_architecture(TINY | {"architectures": architectures})


def test_every_supported_architecture_is_compared_with_hugging_face() -> None:
    families = {f"{family}ForCausalLM" for family, _ in TINY_MODELS.values()}

    assert families == {f"{family}ForCausalLM" for family, *_ in PUBLISHED.values()} == set(SUPPORTED_ARCHITECTURES)

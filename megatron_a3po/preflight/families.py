"""The architectures that can be trained, read from config.json of a Hugging Face model."""

from collections.abc import Callable
from typing import Any

from megatron_a3po.errors import ConfigError
from megatron_a3po.preflight.architecture import Architecture, Experts, LatentAttention

SUPPORTED_ARCHITECTURES = (
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "LlamaForCausalLM",
    "Qwen3MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
)
_HEAD_DIMS = {"Qwen3ForCausalLM": 128, "GptOssForCausalLM": 64}
"""Default head dimension, if it is not the hidden size divided by the number of heads"""


class OddFields(ConfigError):
    """Error: fields of a config.json are missing or invalid."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        super().__init__(f"config.json: missing or invalid: {', '.join(fields)}; copy the model again")
        self.fields = fields


class _Fields:
    """Reader of a config.json that collects the invalid fields; a null field counts as absent."""

    def __init__(self, described: dict[str, Any]) -> None:
        self._described = described
        self.odd: list[str] = []

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return the first present field of `names`, else the default; without a default the field is required."""
        given = [name for name in names if self._described.get(name) is not None]
        value = self._described[given[0]] if given else default
        if type(value) is not int or value < least:
            self.odd.append((given or names)[0])
            return least
        return value

    def is_null(self, name: str) -> bool:
        return name in self._described and self._described[name] is None

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._described.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            self.odd.append(name)
        return bool(value)

    def items(self, name: str, kind: type, default: list[Any]) -> list[Any]:
        values = self._described.get(name)
        if values is None:
            return default
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            self.odd.append(name)
            return default
        return values


def architecture_name(described: dict[str, Any]) -> Any:
    """Return the first entry of `architectures`, which may be anything."""
    named = described.get("architectures")
    return named[0] if isinstance(named, list) and named else named


def read_architecture(described: dict[str, Any]) -> Architecture:
    """Return the architecture that a config.json describes, with the defaults of transformers for optional fields.

    Raises OddFields with every field that is missing or invalid, and ConfigError for a class not in
    `SUPPORTED_ARCHITECTURES`.
    """
    name = architecture_name(described)
    if name not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(f"architecture {name!r} is not supported; use one of {', '.join(SUPPORTED_ARCHITECTURES)}")
    fields = _Fields(described)
    architecture = _read(name, fields)
    if fields.odd:
        raise OddFields(tuple(dict.fromkeys(fields.odd)))
    return architecture


def _read(name: str, fields: _Fields) -> Architecture:
    layers, hidden = fields.number("num_hidden_layers"), fields.number("hidden_size")
    heads = fields.number("num_attention_heads")
    bias = name == "Qwen2ForCausalLM" or fields.flag("attention_bias", default=name == "GptOssForCausalLM")
    experts, moe_layers = _EXPERTS.get(name, _no_experts)(fields, layers)
    latent = _latent_attention(fields) if name == "DeepseekV3ForCausalLM" else None
    return Architecture(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=fields.number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads if latent else fields.number("num_key_value_heads", default=heads),
        head_dim=latent.nope_dim + latent.rope_dim
        if latent
        else fields.number("head_dim", default=_HEAD_DIMS.get(name, max(1, hidden // heads))),
        vocab_size=fields.number("vocab_size"),
        max_positions=fields.number("max_position_embeddings"),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        input_bias=bias,
        output_bias=bias and name not in ("Qwen2ForCausalLM", "Glm4MoeForCausalLM"),
        mlp_bias=name == "LlamaForCausalLM" and fields.flag("mlp_bias", default=False),
        qk_norm=name.startswith("Qwen3")
        or (name == "Glm4MoeForCausalLM" and fields.flag("use_qk_norm", default=False)),
        attention_sinks=name == "GptOssForCausalLM",
        latent=latent,
        experts=experts,
        moe_layers=moe_layers,
        windows=_windows(fields, layers) if name == "GptOssForCausalLM" else (None,) * layers,
        mtp_layers=fields.number("num_nextn_predict_layers", default=0, least=0),
    )


def _latent_attention(fields: _Fields) -> LatentAttention:
    return LatentAttention(
        query_rank=None if fields.is_null("q_lora_rank") else fields.number("q_lora_rank"),
        kv_rank=fields.number("kv_lora_rank"),
        nope_dim=fields.number("qk_nope_head_dim"),
        rope_dim=fields.number("qk_rope_head_dim"),
        value_dim=fields.number("v_head_dim"),
    )


def _windows(fields: _Fields, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer; by default every other layer has one, beginning with the first."""
    window = fields.number("sliding_window", default=128)
    kinds = fields.items("layer_types", str, ["sliding_attention", "full_attention"] * layers)[:layers]
    if len(kinds) < layers:
        fields.odd.append("layer_types")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_MlpKinds = tuple[Experts | None, tuple[bool, ...]]


def _no_experts(fields: _Fields, layers: int) -> _MlpKinds:
    return None, (False,) * layers


def _qwen_experts(fields: _Fields, layers: int) -> _MlpKinds:
    step = fields.number("decoder_sparse_step", default=1)
    dense = set(fields.items("mlp_only_layers", int, []))
    experts = Experts(
        num_experts=fields.number("num_experts", "num_local_experts"),
        per_token=fields.number("num_experts_per_tok"),
        intermediate_size=fields.number("moe_intermediate_size"),
        shared_intermediate_size=0,
        bias=False,
    )
    return experts, tuple((index + 1) % step == 0 and index not in dense for index in range(layers))


def _deepseek_experts(fields: _Fields, layers: int) -> _MlpKinds:
    """Return the experts of DeepSeek-V3 or GLM-4.5."""
    dense = fields.number("first_k_dense_replace", least=0)
    intermediate = fields.number("moe_intermediate_size")
    experts = Experts(
        num_experts=fields.number("n_routed_experts", "num_local_experts"),
        per_token=fields.number("num_experts_per_tok"),
        intermediate_size=intermediate,
        shared_intermediate_size=intermediate * fields.number("n_shared_experts", default=1, least=0),
        bias=False,
    )
    return experts, tuple(index >= dense for index in range(layers))


def _gpt_oss_experts(fields: _Fields, layers: int) -> _MlpKinds:
    experts = Experts(
        num_experts=fields.number("num_local_experts", "num_experts"),
        per_token=fields.number("num_experts_per_tok", "experts_per_token"),
        intermediate_size=fields.number("intermediate_size"),
        shared_intermediate_size=0,
        bias=True,
    )
    return experts, (True,) * layers


_EXPERTS: dict[str, Callable[[_Fields, int], _MlpKinds]] = {
    "Qwen3MoeForCausalLM": _qwen_experts,
    "Glm4MoeForCausalLM": _deepseek_experts,
    "DeepseekV3ForCausalLM": _deepseek_experts,
    "GptOssForCausalLM": _gpt_oss_experts,
}

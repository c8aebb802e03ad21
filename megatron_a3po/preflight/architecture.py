"""The sizes of a model, from which layout checks, FLOPs and the memory estimate are computed."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries, keys and values of low rank."""

    query_rank: int | None
    """None: queries come from the hidden state directly"""
    kv_rank: int
    nope_dim: int
    """dimension of the part of a head's query and key without position"""
    rope_dim: int
    """dimension of the part of a head's query and key with position; all heads share that of the key"""
    value_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The mixture-of-experts MLP."""

    num_experts: int
    per_token: int
    intermediate_size: int
    """of one expert"""
    shared_intermediate_size: int
    """of all experts together that see every token; 0: there are none"""
    bias: bool
    """on the experts and on the router"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerParameters:
    """Numbers of parameters of one layer or a part of it, by the way a layout divides them."""

    sharded: int = 0
    """divided among the tensor-parallel ranks"""
    replicated: int = 0
    """whole on every tensor-parallel rank"""
    experts: int = 0
    """divided among the expert-parallel ranks"""

    def __add__(self, other: "LayerParameters") -> "LayerParameters":
        return LayerParameters(
            sharded=self.sharded + other.sharded,
            replicated=self.replicated + other.replicated,
            experts=self.experts + other.experts,
        )

    @property
    def total(self) -> int:
        return self.sharded + self.replicated + self.experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A decoder-only transformer with gated MLPs and RMS norms, without its layers for multi-token prediction."""

    name: str
    """the class in Hugging Face's transformers"""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """of a dense MLP"""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """of queries and keys; under latent attention, those of both parts"""
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    """the output layer's weight is the embedding's"""
    input_bias: bool
    """of the projections to queries, keys and values; under latent attention, of those to the low ranks"""
    output_bias: bool
    """of the projection behind the attention"""
    mlp_bias: bool
    """of the dense MLPs"""
    qk_norm: bool
    attention_sinks: bool
    """one learned logit per head"""
    latent: LatentAttention | None
    experts: Experts | None
    moe_layers: tuple[bool, ...]
    """for each layer, whether its MLP is a mixture of experts"""
    windows: tuple[int | None, ...]
    """for each layer, how many tokens it attends to, its own included; None: all"""
    mtp_layers: int
    """layers for multi-token prediction in the checkpoint, in addition to `num_layers`"""

    @property
    def num_moe_layers(self) -> int:
        return sum(self.moe_layers)

    @property
    def num_parameters(self) -> int:
        """Parameters of the Hugging Face model, counting each shared tensor once."""
        layers = sum(self.layer_parameters(index).total for index in range(self.num_layers))
        return self.embedding_parameters * (1 if self.tied_embeddings else 2) + layers + self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and as many of an untied output layer."""
        return self.vocab_size * self.hidden_size

    def layer_parameters(self, index: int) -> LayerParameters:
        """Return the parameters of a layer; `index` starts at 0."""
        norms = LayerParameters(replicated=2 * self.hidden_size)
        return (
            norms + self.attention_parameters + (self.moe_parameters if self.moe_layers[index] else self.mlp_parameters)
        )

    @property
    def attention_parameters(self) -> LayerParameters:
        """Parameters of the attention of one layer."""
        hidden, latent = self.hidden_size, self.latent
        if latent is None:
            queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            inputs = queries + 2 * keys
            sharded = inputs * (hidden + self.input_bias) + queries * hidden + self.num_heads * self.attention_sinks
            replicated = hidden * self.output_bias + 2 * self.head_dim * self.qk_norm
            return LayerParameters(sharded=sharded, replicated=replicated)
        queries = self.num_heads * self.head_dim
        down = latent.kv_rank + latent.rope_dim + (latent.query_rank or 0)
        ranks = latent.kv_rank + (latent.query_rank or 0)
        return LayerParameters(
            sharded=queries * (latent.query_rank or hidden)
            + latent.kv_rank * self.num_heads * (latent.nope_dim + latent.value_dim)
            + self.num_heads * latent.value_dim * hidden,
            # Megatron replicates the projections to the low ranks, and their norms, on every rank.
            replicated=down * (hidden + self.input_bias) + ranks + hidden * self.output_bias,
        )

    @property
    def mlp_parameters(self) -> LayerParameters:
        """Parameters of a dense MLP."""
        weights = 3 * self.hidden_size * self.intermediate_size
        bias = self.mlp_bias
        return LayerParameters(sharded=weights + 2 * self.intermediate_size * bias, replicated=self.hidden_size * bias)

    @property
    def moe_parameters(self) -> LayerParameters:
        """Parameters of a mixture of experts and its router."""
        hidden, experts = self.hidden_size, self.experts
        if experts is None:
            return LayerParameters()
        one = 3 * hidden * experts.intermediate_size + (2 * experts.intermediate_size + hidden) * experts.bias
        return LayerParameters(
            sharded=3 * hidden * experts.shared_intermediate_size,
            replicated=experts.num_experts * (hidden + experts.bias),
            experts=experts.num_experts * one,
        )

    def forward_flops(self, length: int) -> float:
        """Return the floating-point operations of the forward pass of one sequence of `length` tokens.

        This counts two per token and weight of its matrix products, output layer included (Kaplan et al. 2020, arXiv
        2001.08361, section 2.1; of experts, those the token is routed to). For attention it counts two per pair of
        tokens that see each other, head, and dimension of key and value (PaLM, arXiv 2204.02311, appendix B, causal
        half only). The backward pass costs twice as much; norms, biases and activations are neglected.
        """
        latent = self.latent
        key_and_value = self.head_dim + (self.head_dim if latent is None else latent.value_dim)
        weights = self.hidden_size * self.vocab_size + self.num_layers * self._attention_weights
        weights += self.num_moe_layers * self._active_moe_weights
        weights += (self.num_layers - self.num_moe_layers) * 3 * self.hidden_size * self.intermediate_size
        pairs = sum(_pairs(length, window) for window in self.windows)
        return 2.0 * weights * length + 2.0 * self.num_heads * key_and_value * pairs

    @property
    def _attention_weights(self) -> int:
        hidden, latent = self.hidden_size, self.latent
        if latent is None:
            return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * hidden
        down = (latent.kv_rank + latent.rope_dim + (latent.query_rank or 0)) * hidden
        return down + self.attention_parameters.sharded

    @property
    def _active_moe_weights(self) -> int:
        if self.experts is None:
            return 0
        width = self.experts.per_token * self.experts.intermediate_size + self.experts.shared_intermediate_size
        return 3 * self.hidden_size * width + self.hidden_size * self.experts.num_experts


def _pairs(length: int, window: int | None) -> int:
    """Return the number of pairs of a token and one that it attends to."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen

"""What the backward pass keeps of a layer's forward pass."""

from megatron_a3po.preflight.architecture import Architecture

_FLOAT32 = 4


def layer_activation_bytes(architecture: Architecture, index: int, item_bytes: int) -> int:
    """Per token, of layer `index`; tensor parallelism with sequence parallelism divides all of it.

    The accounting of Korthikanti et al. 2022 (arXiv 2205.05198, sections 4 and 5), which gives 34 bytes x hidden size
    for GPT in half precision: every tensor that a backward formula needs, once. Here without dropout and its masks
    (2 of the 34), with grouped queries, a gated MLP, and attention that keeps no scores but, per head, a float32
    normaliser. Experts are taken to be evenly loaded.
    """
    hidden = architecture.hidden_size
    norms = 4 * hidden  # the input and the output of both
    mlp = 3 * architecture.intermediate_size
    experts = architecture.experts
    if architecture.moe_layers[index] and experts:
        routed = experts.per_token * (hidden + 3 * experts.intermediate_size)
        mlp = routed + 3 * experts.shared_intermediate_size
    return item_bytes * (norms + _attention_width(architecture) + mlp) + _FLOAT32 * architecture.num_heads


def _attention_width(architecture: Architecture) -> int:
    """Queries, keys, values and the output, with what lies before them and a norm."""
    heads, kv_heads, head_dim = architecture.num_heads, architecture.num_kv_heads, architecture.head_dim
    latent = architecture.latent
    if latent is None:
        before_norms = (heads + kv_heads) * head_dim if architecture.qk_norm else 0
        return (2 * heads + 2 * kv_heads) * head_dim + before_norms
    low_rank = 2 * (latent.query_rank or 0) + 2 * latent.kv_rank + latent.rope_dim
    # Keys exist twice: as they come from the low rank, beside the values, and with the shared position in each head.
    return low_rank + heads * (2 * head_dim + latent.nope_dim + 2 * latent.value_dim)

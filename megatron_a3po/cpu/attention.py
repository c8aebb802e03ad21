"""Core attention on the CPU, in the place of Transformer Engine's `DotProductAttention`."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_a3po.errors import ConfigError


def packed_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, lengths: Tensor, softmax_scale: float | None = None
) -> Tensor:
    """Causal attention inside each of the packed sequences; tokens that belong to none of them give zeros.

    A call per sequence costs more than its arithmetic when sequences are short, so sequences of similar length share
    one batched call. Lengths in a bucket differ by less than a factor of two, which bounds the padding, and padding
    sits behind the tokens, where causality keeps it out of sight. No token ever meets another sequence's values.

    Args:
        query: [tokens, heads, key_dim]
        key, value: [tokens, kv_heads, key_dim or value_dim]; kv_heads divides heads.
        starts, lengths: [sequences] integers; sequence i holds tokens starts[i] .. starts[i] + lengths[i] - 1.
        softmax_scale: 1 / sqrt(key_dim) if None.

    Returns:
        [tokens, heads, value_dim], dtype of `value`.
    """
    buckets = torch.frexp(lengths.double())[1]  # the number of binary digits of the length; 0 for empty sequences
    outputs, positions = [], []
    for bucket in buckets.unique().tolist():
        if bucket == 0:
            continue
        members = buckets == bucket
        offsets = torch.arange(int(lengths[members].max()))
        is_token = offsets < lengths[members, None]  # [sequences of the bucket, width]
        tokens = (starts[members, None] + offsets)[is_token]
        slots = is_token.flatten().nonzero().squeeze(1)
        query_, key_, value_ = (_padded(x, tokens, slots, is_token.shape) for x in (query, key, value))
        output = _causal_sdpa(query_, key_, value_, softmax_scale).transpose(1, 2)
        outputs.append(output.flatten(0, 1).index_select(0, slots))
        positions.append(tokens)
    result = value.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    return result.index_copy(0, torch.cat(positions), torch.cat(outputs)) if outputs else result


def _padded(packed: Tensor, tokens: Tensor, slots: Tensor, shape: torch.Size) -> Tensor:
    """[tokens, heads, dim] -> [sequences, heads, width, dim], zeros behind each sequence's last token."""
    flat = packed.new_zeros(shape.numel(), *packed.shape[1:])
    return flat.index_copy(0, slots, packed.index_select(0, tokens)).view(*shape, *packed.shape[1:]).transpose(1, 2)


def _causal_sdpa(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float | None) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
    )


class CpuDotProductAttention(torch.nn.Module):
    """Causal self-attention for Megatron's `sbhd` and packed `thd` layouts. Has no parameters."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        refused = {
            "context_parallel_size": config.context_parallel_size > 1,
            "attention_dropout": dropout > 0,
            "window_size": config.window_size is not None,
            "softmax_type": config.softmax_type != "vanilla",
            "attention_type": attention_type != "self",
        }
        for name, unsupported in refused.items():
            if unsupported:
                found = getattr(config, name, attention_type)
                raise ConfigError(f"device: cpu has no attention with {name}={found}; use device: cuda for this model")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Megatron's interface of core attention; like Transformer Engine, `causal` ignores `attention_mask`.

        Args:
            query, key, value: [sequence, batch, heads, dim], or packed [tokens, heads, dim] or [tokens, 1, heads, dim].

        Returns:
            [sequence, batch, heads * dim], or packed [tokens, heads * dim] or [tokens, 1, heads * dim].
        """
        mask_type = attn_mask_type or self.attn_mask_type
        if mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal) or attention_bias is not None:
            raise ConfigError(f"device: cpu has causal attention without bias only, not {mask_type}")
        if packed_seq_params is not None:
            if query.dim() == 4:
                query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
                return self._packed(query, key, value, packed_seq_params).unsqueeze(1)
            return self._packed(query, key, value, packed_seq_params)
        if mask_type is AttnMaskType.padding_causal:
            raise ConfigError("device: cpu takes variable lengths as packed sequences (thd), not as padding")
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        output = _causal_sdpa(query, key, value, self.softmax_scale)
        return output.permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        padded_starts = packed.cu_seqlens_q_padded
        starts = (packed.cu_seqlens_q if padded_starts is None else padded_starts)[:-1]
        lengths = packed.cu_seqlens_q.diff()
        return packed_causal_attention(query, key, value, starts, lengths, self.softmax_scale).flatten(1)

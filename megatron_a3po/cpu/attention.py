"""Core attention on the CPU, in place of Transformer Engine's `DotProductAttention`."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megatron_a3po.errors import ConfigError


def packed_causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_spans: Tensor,
    key_spans: Tensor,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Compute causal attention inside each packed sequence. Tokens of `query` in no sequence give zeros.

    The queries of a sequence are its last tokens: all of them, or the chunk that this context-parallel rank computes.

    Sequences of similar length share one batched call, because a call for each short sequence costs more than its
    arithmetic. Lengths in a bucket differ by less than a factor of two, which bounds the padding. Padding stands behind
    the tokens, where causality hides it. No token sees values of another sequence.

    Args:
        query: [query tokens, heads, key_dim]
        key, value: [tokens, kv_heads, key_dim or value_dim]; kv_heads divides heads.
        query_spans, key_spans: [sequences, 2] integers; a row (start, length) stands for tokens start ..
            start + length - 1 of `query`, or of `key` and `value`. A query length is at most the key length.
        softmax_scale: 1 / sqrt(key_dim) if None.
        window: how many tokens before itself a token sees; all if None.
        sink: [heads] scores of a token without value that every token sees; none if None.

    Returns:
        [query tokens, heads, value_dim], dtype of `value`.
    """
    digits = torch.frexp(torch.stack([query_spans[:, 1], key_spans[:, 1]], 1).double())[1]  # 0 for empty spans
    outputs, positions = [], []
    for bucket in digits.unique(dim=0):
        if not bucket[0]:
            continue
        members = (digits == bucket).all(1)
        query_tokens, query_slots, query_shape = _slots(query_spans[members])
        key_tokens, key_slots, key_shape = _slots(key_spans[members])
        key_, value_ = (_padded(x, key_tokens, key_slots, key_shape) for x in (key, value))
        query_ = _padded(query, query_tokens, query_slots, query_shape)
        if window is None and sink is None and torch.equal(query_spans[members, 1], key_spans[members, 1]):
            output = _sdpa(query_, key_, value_, softmax_scale, is_causal=True)
        else:
            allowed = _causal_mask(query_spans[members, 1], key_spans[members, 1], window)
            output = _masked_sdpa(query_, key_, value_, softmax_scale, allowed, sink)
        outputs.append(output.transpose(1, 2).flatten(0, 1).index_select(0, query_slots))
        positions.append(query_tokens)
    result = value.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    return result.index_copy(0, torch.cat(positions), torch.cat(outputs)) if outputs else result


def _slots(spans: Tensor) -> tuple[Tensor, Tensor, torch.Size]:
    """Return the tokens of the spans, their places in a flat [sequences, longest] table, and the table's shape."""
    starts, lengths = spans.unbind(1)
    offsets = torch.arange(int(lengths.max()))
    is_token = offsets < lengths[:, None]
    return (starts[:, None] + offsets)[is_token], is_token.flatten().nonzero().squeeze(1), is_token.shape


def _padded(packed: Tensor, tokens: Tensor, slots: Tensor, shape: torch.Size) -> Tensor:
    """Turn [tokens, heads, dim] into [sequences, heads, width, dim], with zeros behind each sequence."""
    flat = packed.new_zeros(shape.numel(), *packed.shape[1:])
    return flat.index_copy(0, slots, packed.index_select(0, tokens)).view(*shape, *packed.shape[1:]).transpose(1, 2)


def _causal_mask(query_lengths: Tensor, key_lengths: Tensor, window: int | None) -> Tensor:
    """Return [sequences, 1, queries, keys]: whether a query sees a key. Padded queries see some, to be finite."""
    places = torch.arange(int(query_lengths.max())) + (key_lengths - query_lengths)[:, None]
    distances = places[:, None, :, None] - torch.arange(int(key_lengths.max()))
    return distances >= 0 if window is None else (distances >= 0) & (distances <= window)


def _masked_sdpa(
    query: Tensor, key: Tensor, value: Tensor, softmax_scale: float | None, allowed: Tensor, sink: Tensor | None
) -> Tensor:
    if sink is None:
        return _sdpa(query, key, value, softmax_scale, attn_mask=allowed)
    # Add a key and a value of zeros with the sink as score: only the denominator of the softmax changes.
    scores = query.new_zeros(allowed.shape).masked_fill(~allowed, -torch.inf).expand(-1, query.shape[1], -1, -1)
    sinks = sink.to(query.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
    key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    return _sdpa(query, key, value, softmax_scale, attn_mask=torch.cat([scores, sinks], -1))


def _sdpa(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float | None, **mask: Any) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, scale=softmax_scale, enable_gqa=grouped, **mask)


class CpuDotProductAttention(torch.nn.Module):
    """Causal self-attention for Megatron's `sbhd` and packed `thd` layouts; with context parallelism for `thd` only.

    Its only parameters are the sinks of `softmax_type="learnable"`: `softmax_offset` [heads / tp].
    """

    softmax_offset: Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        *,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        refused = {
            "attention_dropout": (dropout, dropout > 0),
            "softmax_type": (config.softmax_type, config.softmax_type not in ("vanilla", "learnable")),
            "attention_type": (attention_type, attention_type != "self"),
        }
        for name, (found, unsupported) in refused.items():
            if unsupported:
                raise ConfigError(f"device: cpu has no attention with {name}={found}; use device: cuda for this model")
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.window: int | None = None
        window: Any = config.window_size
        if is_layer_window_attention(window, config.window_attn_skip_freq, layer_number) and window[0] >= 0:
            self.window = window[0]
        self.tp_group = None if pg_collection is None else pg_collection.tp
        self.cp_group = None
        if config.context_parallel_size > 1:
            get_group = parallel_state.get_context_parallel_group
            self.cp_group = get_group() if pg_collection is None else pg_collection.cp
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

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
        """Compute Megatron's core attention. `causal` ignores `attention_mask`, as in Transformer Engine.

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
        if mask_type is AttnMaskType.padding_causal or self.cp_group is not None:
            raise ConfigError(
                "device: cpu takes variable lengths and context parallelism as packed sequences (thd) only"
            )
        length, batch = query.shape[:2]
        spans = torch.tensor([(length * i, length) for i in range(batch)])
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        return self._attend(query, key, value, spans, spans).view(batch, length, -1).transpose(0, 1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        padded = packed.cu_seqlens_q_padded
        if self.cp_group is not None:
            return self._context_parallel(query, key, value, packed.cu_seqlens_q if padded is None else padded)
        starts = (packed.cu_seqlens_q if padded is None else padded)[:-1]
        spans = torch.stack([starts, packed.cu_seqlens_q.diff()], 1)
        return self._attend(query, key, value, spans, spans)

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor) -> Tensor:
        """Gather keys and values of all ranks' local chunks [tokens / cp] to whole sequences, for the local queries.

        Padding between sequences counts as their last tokens, which no other token sees.
        """
        group = self.cp_group
        assert group is not None
        size, rank = group.size(), group.rank()
        starts, chunks = boundaries[:-1].long(), zigzag_chunk_lengths(boundaries, size)
        query_starts = starts // size
        query_spans = torch.cat(
            [torch.stack([query_starts, chunks], 1), torch.stack([query_starts + chunks, chunks], 1)]
        )
        seen = (rank + 1, 2 * size - rank)  # chunks of the sequence up to the end of this rank's first, second chunk
        key_spans = torch.cat([torch.stack([starts, chunks * number], 1) for number in seen])
        local = torch.cat([key, value], -1)
        gathered = gather_from_sequence_parallel_region(local, group=group)
        whole = gathered.index_select(0, zigzag_sources(boundaries, size, key.shape[0]))
        key, value = whole.split([key.shape[-1], value.shape[-1]], -1)
        return self._attend(query, key, value, query_spans, key_spans)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, query_spans: Tensor, key_spans: Tensor) -> Tensor:
        return packed_causal_attention(
            query,
            key,
            value,
            query_spans,
            key_spans,
            softmax_scale=self.softmax_scale,
            window=self.window,
            sink=self.softmax_offset,
        ).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sinks, if there are any, with Transformer Engine's key."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group or parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


def zigzag_chunk_lengths(boundaries: Tensor, cp_size: int) -> Tensor:
    """Return, as [sequences] int64, the length of the 2 * cp_size equal chunks of each sequence.

    Rank r of the context-parallel group holds chunks r and 2 * cp_size - 1 - r, which balances causal attention.

    Args:
        boundaries: [sequences + 1] integers, the bounds of the whole sequences in the whole pack.

    Raises:
        ValueError: a sequence's length is not a multiple of 2 * cp_size.
    """
    lengths = boundaries.diff().long()
    if bool((lengths % (2 * cp_size)).any()):
        raise ValueError(f"context parallelism needs lengths that {2 * cp_size} divides, got {lengths.tolist()}")
    return lengths // (2 * cp_size)


def zigzag_sources(boundaries: Tensor, cp_size: int, local_tokens: int) -> Tensor:
    """Return, as [tokens] int64, where each token of the whole pack lies in the concatenated local packs of all ranks.

    Args:
        boundaries: as for `zigzag_chunk_lengths`.
        local_tokens: length of each rank's local pack, at least boundaries[-1] / cp_size.
    """
    chunks = zigzag_chunk_lengths(boundaries, cp_size)
    sequence = torch.arange(len(chunks)).repeat_interleave(boundaries.diff())
    start, chunk = boundaries[:-1].long()[sequence], chunks[sequence]
    place = torch.arange(len(sequence)) - start
    number = place // chunk
    rank = torch.minimum(number, 2 * cp_size - 1 - number)
    local = start // cp_size + place % chunk + chunk * (number >= cp_size)
    return rank * local_tokens + local

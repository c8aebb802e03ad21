"""Attention over sequences that are spread over ranks equals attention over whole sequences."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.launch import run_ranks

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 12, 8
CHUNKS = [3, 1, 0, 5, 8, 1, 2]
"""Lengths of the sequences in chunks of 2 x context-parallel ranks; one is empty"""


@pytest.mark.distributed
def test_context_parallel_attention_and_its_gradients_equal_whole_sequence_attention() -> None:
    output = run_ranks(_compare_with_whole_sequences, 4, timeout_seconds=100)
    assert output.count("compared") == 6


def _compare_with_whole_sequences() -> None:
    from megatron_a3po import cpu

    cpu.install()
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group in (dist.group.WORLD, pairs[dist.get_rank() // 2]):
        for window, sinks in ((None, None), (4, None), (None, torch.linspace(-1.0, 1.0, HEADS))):
            _compare(group, window, sinks)
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"compared {group.size()} ranks", flush=True)
    dist.destroy_process_group()


def _compare(group: Any, window: int | None, sinks: Any) -> None:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_a3po.cpu.attention import CpuDotProductAttention

    size, rank = group.size(), group.rank()
    config: Any = SimpleNamespace(
        attention_dropout=0.0,
        context_parallel_size=size,
        tensor_model_parallel_size=1,
        num_attention_heads=HEADS,
        params_dtype=torch.float32,
        softmax_type="vanilla" if sinks is None else "learnable",
        window_size=None if window is None else (window, 0),
        window_attn_skip_freq=None,
    )
    groups = SimpleNamespace(cp=group, tp=None)
    attention = CpuDotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    if attention.softmax_offset is not None:
        attention.softmax_offset.data.copy_(sinks)

    lengths = [2 * size * chunk for chunk in CHUNKS]
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, KEY_DIM), (KV_HEADS, KEY_DIM), (KV_HEADS, VALUE_DIM), (HEADS, VALUE_DIM))
    *whole, direction = (torch.randn(sum(lengths), *shape, generator=generator).double() for shape in shapes)
    for x in whole:
        x.requires_grad_()
    parts = zip(*(x.split(lengths) for x in whole), strict=True)
    expected = torch.cat([_naive_causal_attention(*part, window, sinks) for part in parts])
    expected_gradients = torch.autograd.grad(expected, whole, direction)

    def mine(x: Any) -> Any:
        """This rank's chunks of every sequence, and a token behind the last that belongs to none."""
        chunks = [sequence.chunk(2 * size) for sequence in x.split(lengths) if len(sequence)]
        local = [torch.cat([chunk[rank], chunk[2 * size - 1 - rank]]) for chunk in chunks]
        return torch.cat([*local, x.new_zeros(1, *x.shape[1:])]).detach()

    local = [mine(x).float().requires_grad_() for x in whole]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    output = attention(*local, None, packed_seq_params=packed)
    torch.testing.assert_close(output.double(), mine(expected).flatten(1), atol=1e-6, rtol=1e-5)
    gradients = torch.autograd.grad(output, local, mine(direction).float().flatten(1))
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), mine(expected_gradient), atol=1e-5, rtol=1e-5)


def _naive_causal_attention(query: Any, key: Any, value: Any, window: int | None, sinks: Any) -> Any:
    """One whole sequence, [tokens, heads, dim], as the formula says."""
    import torch

    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(KEY_DIM)
    before = torch.arange(len(query))[:, None] - torch.arange(len(query))
    exponentials = scores.exp() * ((before >= 0) & (before <= (len(query) if window is None else window)))
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", exponentials / total, value)

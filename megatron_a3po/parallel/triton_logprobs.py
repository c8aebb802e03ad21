"""The forward pass of `linear_logprobs_and_entropy` as one Triton kernel, for CUDA.

Each program owns some tokens and one slice of the vocabulary. It computes the slice's logits tile by tile in registers
and folds each tile into four running floats per token. The backward pass has no kernel: it consists of matrix products
over tiles, for which the library is fastest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_a3po.errors import TrainingError

_BLOCK_TOKENS, _BLOCK_COLUMNS, _BLOCK_HIDDEN = 64, 128, 64
_MIN_PROGRAMS = 264
"""Two for each multiprocessor of an H100. With few tokens, the vocabulary is cut into more slices."""
_EXCLUDED = tl.constexpr(-1e30)


def local_statistics(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, first: int, num_real_columns: int, temperature: float
) -> Tensor:
    """Return [slices, 4, tokens] float32, to be merged over the slices.

    The four are the maximum of z, the sum of e^(z - maximum), that sum weighted by z - maximum, and the label's z or 0
    if its column is elsewhere; z is the logit over the temperature. hidden [tokens, hidden size] and weight
    [columns, hidden size] have one dtype; products are accumulated in float32. labels [tokens] int64: in the whole
    vocabulary, in which this rank's columns start at `first`. Columns from `num_real_columns` on are padding.
    """
    num_tokens, hidden_size = hidden.shape
    num_columns = weight.shape[0]
    token_blocks = triton.cdiv(num_tokens, _BLOCK_TOKENS)
    column_blocks = triton.cdiv(num_columns, _BLOCK_COLUMNS)
    slices = max(1, min(column_blocks, triton.cdiv(_MIN_PROGRAMS, token_blocks)))
    blocks_per_slice = triton.cdiv(column_blocks, slices)
    slices = triton.cdiv(column_blocks, blocks_per_slice)
    statistics = torch.empty(slices, 4, num_tokens, dtype=torch.float32, device=hidden.device)
    _statistics_kernel[(token_blocks, slices)](
        hidden.contiguous(),
        weight.contiguous(),
        labels,
        statistics,
        num_tokens,
        num_columns,
        min(max(num_real_columns, 0), num_columns),
        hidden_size,
        first,
        1.0 / temperature,
        blocks_per_slice,
        BLOCK_TOKENS=_BLOCK_TOKENS,
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
        BLOCK_HIDDEN=_BLOCK_HIDDEN,
    )
    return statistics


def check_kernel(device: torch.device) -> None:
    """Compare the kernel with double precision on a small problem. Raises TrainingError if it is wrong.

    Otherwise a kernel that fails on some GPU or with some compiler would silently train on wrong log-probs.
    """
    # (first, num_real_columns) of one rank with padding, of the first of two ranks, and of the last, with padding.
    cases = [(0, 650), (0, 1350), (700, 650)]
    # Triton's interpreter, on a CPU, cannot multiply bf16.
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    difference = max(_difference(device, dtype, *case) for dtype in dtypes for case in cases)
    if not difference <= 1e-3:
        raise TrainingError(
            f"the Triton kernel of the fused output layer is off by {difference:.1e} on {device}; set "
            "actor.output_layer: logits"
        )


def _difference(device: torch.device, dtype: torch.dtype, first: int, num_real_columns: int) -> float:
    """Return the largest error of log normaliser, mean logit below the maximum, and label's logit over 100 tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(100, 192, generator=generator).to(dtype)
    weight = torch.randn(700, 192, generator=generator).to(dtype)
    labels = torch.randint(0, first + num_real_columns, (100,), generator=generator)
    inputs = (tensor.to(device) for tensor in (hidden, weight, labels))
    slices = local_statistics(*inputs, first=first, num_real_columns=num_real_columns, temperature=1.0).double().cpu()
    maximum = slices[:, 0].amax(0)
    lower = slices[:, 0] - maximum
    normaliser = (lower.exp() * slices[:, 1]).sum(0)
    weighted = (lower.exp() * (slices[:, 2] + lower * slices[:, 1])).sum(0)
    ours = torch.stack([maximum + normaliser.log(), weighted / normaliser, slices[:, 3].sum(0)])

    z = (hidden.double() @ weight.double().T)[:, :num_real_columns]
    below = z - z.amax(1, keepdim=True)
    column = labels - first
    is_here = (column >= 0) & (column < z.shape[1])
    label_logit = torch.where(is_here, z.gather(1, column.clamp(0, z.shape[1] - 1)[:, None])[:, 0], 0.0)
    expected = torch.stack([z.logsumexp(1), (z.softmax(1) * below).sum(1), label_logit])
    return (ours - expected).abs().max().item()


@triton.jit
def _statistics_kernel(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    labels,
    statistics,
    num_tokens,
    num_columns,
    num_real_columns,
    hidden_size,
    first,
    inverse_temperature,
    blocks_per_slice,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = tokens < num_tokens
    # 64-bit: tokens or columns times the hidden size can pass 2^31.
    token_offsets = tokens.to(tl.int64)[:, None] * hidden_size
    label_columns = tl.load(labels + tokens, mask=is_token, other=-1) - first
    maximum = tl.full([BLOCK_TOKENS], _EXCLUDED, tl.float32)
    normaliser = tl.zeros([BLOCK_TOKENS], tl.float32)
    weighted = tl.zeros([BLOCK_TOKENS], tl.float32)
    label_logit = tl.zeros([BLOCK_TOKENS], tl.float32)

    for block in range(blocks_per_slice):
        columns = (tl.program_id(1) * blocks_per_slice + block) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        is_column = columns < num_columns
        column_offsets = columns.to(tl.int64)[:, None] * hidden_size
        z = tl.zeros([BLOCK_TOKENS, BLOCK_COLUMNS], tl.float32)
        for start in range(0, hidden_size, BLOCK_HIDDEN):
            features = start + tl.arange(0, BLOCK_HIDDEN)
            is_feature = features < hidden_size
            x = tl.load(hidden + token_offsets + features[None], mask=is_token[:, None] & is_feature[None], other=0.0)
            w = tl.load(weight + column_offsets + features[None], mask=is_column[:, None] & is_feature[None], other=0.0)
            z = tl.dot(x, tl.trans(w), z, input_precision="ieee")
        is_real = (columns < num_real_columns)[None]
        z = tl.where(is_real, z * inverse_temperature, _EXCLUDED)

        # The last block may reach into the next rank's columns, whose labels do not count here.
        label_logit += tl.sum(tl.where(is_real & (columns[None] == label_columns[:, None]), z, 0.0), 1)
        new_maximum = tl.maximum(maximum, tl.max(z, 1))
        shift = maximum - new_maximum
        scale = tl.exp(shift)
        z -= new_maximum[:, None]
        exponentials = tl.exp(z)
        weighted = (weighted + shift * normaliser) * scale + tl.sum(exponentials * z, 1)
        normaliser = normaliser * scale + tl.sum(exponentials, 1)
        maximum = new_maximum

    output = statistics + tl.program_id(1).to(tl.int64) * 4 * num_tokens + tokens
    tl.store(output, maximum, mask=is_token)
    tl.store(output + num_tokens, normaliser, mask=is_token)
    tl.store(output + 2 * num_tokens, weighted, mask=is_token)
    tl.store(output + 3 * num_tokens, label_logit, mask=is_token)

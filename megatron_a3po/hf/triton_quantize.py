"""Quantise weights on CUDA as `hf.quantize` does, by one Triton kernel that reads weights once and writes codes once.

A program of the kernel owns one block. Its results equal those of the CPU bit by bit: divisions are rounded correctly,
and integer arithmetic makes the codes of e4m3, so that GPUs without FP8 and Triton's interpreter can run it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_a3po.errors import PublishError
from megatron_a3po.hf.fp8_blocks import BLOCK, FP8, LARGEST, SMALLEST_SCALE, quantize_by_tiles, scale_shape

_BLOCK = tl.constexpr(BLOCK)
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_SUBNORMALS = tl.constexpr(2.0**14)
"""Near it, float32 has steps of 2^-9, like the subnormal numbers of e4m3."""
_SUBNORMALS_BITS = tl.constexpr((127 + 14) << 23)


def quantize_by_kernel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values, scale_inv) as `quantize_by_tiles` does; weight: [rows, cols] of any strides."""
    rows, cols = weight.shape
    values = torch.empty(rows, cols, dtype=FP8, device=weight.device)
    scales = torch.empty(scale_shape(rows, cols), dtype=torch.float32, device=weight.device)
    if scales.numel():
        _quantize_kernel[tuple(scales.shape)](
            weight, values.view(torch.uint8), scales, rows, cols, weight.stride(0), weight.stride(1), num_warps=8
        )
    return values, scales


def check_kernel(device: torch.device) -> None:
    """Compare the kernel with torch on the CPU, on a small matrix. Raises PublishError.

    With a kernel that is wrong on some GPU or with some compiler, servers would sample from wrong weights.
    """
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    # In one block, all magnitudes of e4m3 and beyond: 2^-12 to 448 on a scale of 1, half of them between two codes.
    codes = torch.arange(1, 0x7F, dtype=torch.uint8).view(FP8).float()
    weight[:128, :128] = 2.0**-12
    weight[0, :126], weight[1, :125] = codes, (codes[1:] + codes[:-1]) / 2
    weight[128:256, :128] = 0
    values, scales = (found.cpu() for found in quantize_by_kernel(weight.to(device)))
    expected_values, expected_scales = quantize_by_tiles(weight)
    wrong_codes = int((values.view(torch.uint8) != expected_values.view(torch.uint8)).sum())
    wrong_scales = int((scales != expected_scales).sum())
    if wrong_codes or wrong_scales:
        raise PublishError(
            f"the Triton kernel that quantises weights to FP8 has {wrong_codes} of {weight.numel()} values and "
            f"{wrong_scales} of {scales.numel()} scales wrong on {device}; serve unquantised weights, or use another "
            "version of triton"
        )


@triton.jit
def _quantize_kernel(weight, values, scales, rows, cols, row_stride, col_stride):  # type: ignore[no-untyped-def]
    # 64-bit: rows times columns can pass 2^31.
    row = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)[:, None]
    col = tl.program_id(1).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)[None]
    is_there = (row < rows) & (col < cols)
    x = tl.load(weight + row * row_stride + col * col_stride, mask=is_there, other=0.0).to(tl.float32)

    magnitude = tl.abs(x)
    largest = tl.max(tl.max(magnitude, 1), 0)
    # Maxima pass over NaN: a block with one, or with an infinity, gets the scale NaN.
    num_usable = tl.sum(tl.sum((magnitude < float("inf")).to(tl.int32), 1), 0)
    scale = tl.maximum(tl.div_rn(largest, tl.full([], _LARGEST, tl.float32)), _SMALLEST_SCALE)
    scale = tl.where(largest > 0, scale, 1.0)
    scale = tl.where(num_usable == _BLOCK * _BLOCK, scale, float("nan"))
    tl.store(scales + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1), scale)

    quotient = tl.div_rn(x, tl.broadcast_to(scale, [_BLOCK, _BLOCK]))
    bits = quotient.to(tl.int32, bitcast=True)
    code = (bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1)  # to the nearest of 3 bits of mantissa, ties to even
    code = (code >> 20) - ((127 - 7) << 3)
    small = tl.abs(quotient)
    subnormal = (small + _SUBNORMALS).to(tl.int32, bitcast=True) - _SUBNORMALS_BITS
    code = tl.where(small < _SMALLEST_NORMAL, subnormal, code) | ((bits >> 24) & 0x80)
    tl.store(values + row * cols + col, code.to(tl.uint8), mask=is_there)

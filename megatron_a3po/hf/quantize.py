"""Quantise weights to FP8 with one scale per block of 128 x 128, in the format of DeepSeek-V3 and Qwen3.

A weight `X.weight` becomes FP8 values and, in `X.weight_scale_inv`, the factors that give the values back:
weight ≈ fp8 * scale_inv, block by block; the last block of a row or column may be smaller. A block's factor is its
largest magnitude / 448, the largest number of e4m3 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). A block of zeros
gets the factor 1, as in transformers' quantiser. SGLang's own quantiser takes a tiny factor instead. Both programs only
multiply by the factors that they read, so either works; 1 does not look like an underflow.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_a3po.errors import A3poError
from megatron_a3po.hf.fp8_blocks import BLOCK, flat, quantize_by_tiles, row_pieces, scale_shape, tiles_of

SCALE_SUFFIX = "_scale_inv"
"""Appended to the weight's name"""
_QUANTIZED = re.compile(
    r"model\.layers\.\d+\.(self_attn|mlp(\.experts\.\d+|\.shared_experts)?)\."
    r"(q_proj|k_proj|v_proj|o_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|gate_proj|up_proj|down_proj)\.weight"
)


class UnusableWeights(A3poError):
    """FP8 cannot hold the weights, or the scales do not fit the values."""


def is_quantized(name: str, ndim: int) -> bool:
    """Tell whether a checkpoint in this format holds the tensor with this Hugging Face name in FP8.

    The linear weights of the layers are in FP8: attention (also latent), dense MLPs, experts and shared experts. These
    are not: embeddings, output layer, norms, routers, biases, sinks, parts of multi-token prediction besides its layer,
    and experts stored as one tensor (gpt-oss), for which the format has no scales.
    """
    return ndim == 2 and _QUANTIZED.fullmatch(name) is not None


def quantization_config(modules_to_not_convert: Sequence[str] = ()) -> dict[str, Any]:
    """Return `quantization_config` for config.json.

    `modules_to_not_convert`: linear modules of the layers that are not in FP8. The output layer, norms and routers need
    not be named, as in the published checkpoints of DeepSeek-V3.
    """
    settings: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    return settings | ({"modules_to_not_convert": list(modules_to_not_convert)} if modules_to_not_convert else {})


def quantize_blockwise(weight: Tensor, name: str = "the weight") -> tuple[Tensor, Tensor]:
    """Quantise a matrix to FP8.

    weight: [rows, cols] float32, bfloat16, float16 or float64, on any device. Returns its FP8 values [rows, cols]
    float8_e4m3fn and scale_inv [ceil(rows/128), ceil(cols/128)] float32, on the same device. Raises UnusableWeights,
    with `name`, for NaN, infinities, another shape, and values that are in FP8 already.
    """
    if weight.ndim != 2 or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise UnusableWeights(
            f"{name}: {list(weight.shape)} {_short(weight.dtype)} cannot be quantised; only a matrix of floats can"
        )
    if weight.is_cuda:
        # Triton asks for a driver when its kernels are defined, so not where there is no GPU.
        from megatron_a3po.hf.triton_quantize import quantize_by_kernel

        values, scales = quantize_by_kernel(weight)
    else:
        values, scales = quantize_by_tiles(weight)
    if not bool(scales.isfinite().all()):
        raise UnusableWeights(
            f"{name}: {_num_not_finite(weight):,} of {weight.numel():,} values are NaN or infinite (in float32); "
            "take the weights of an earlier checkpoint"
        )
    return values, scales


def dequantize_blockwise(values: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Multiply FP8 values by the scales of their blocks, in float32, and round to `dtype`.

    values: [rows, cols] float8_e4m3fn; scale_inv: [ceil(rows/128), ceil(cols/128)] of any float dtype. Returns
    [rows, cols]. Raises UnusableWeights for shapes that do not fit.
    """
    if values.ndim != 2 or tuple(scale_inv.shape) != scale_shape(*values.shape):
        raise UnusableWeights(
            f"scales of shape {list(scale_inv.shape)} do not belong to values of shape {list(values.shape)}: "
            f"blocks are {BLOCK} x {BLOCK}"
        )
    rows, cols = values.shape
    weight = torch.empty(rows, cols, dtype=dtype, device=values.device)
    for piece, blocks in row_pieces(rows, cols):
        tiles = tiles_of(values[piece].float())
        weight[piece] = flat(tiles * scale_inv[blocks].float()[:, None, :, None], weight[piece].shape).to(dtype)
    return weight


def _num_not_finite(weight: Tensor) -> int:
    return sum(int((~weight[piece].float().isfinite()).sum()) for piece, _ in row_pieces(*weight.shape))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

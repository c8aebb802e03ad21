"""FP8 weights with one scale per block of 128 x 128, as DeepSeek-V3 and Qwen3 publish theirs.

A weight `X.weight` becomes FP8 values and, in `X.weight_scale_inv`, the factors that give the values back:
weight ≈ fp8 * scale_inv, block by block; the last block of a row or column may be smaller. A block's factor is its
largest magnitude / 448, the largest number of e4m3 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). A block of zeros
gets the factor 1, as in transformers' quantiser; SGLang, where it quantises by itself, takes a tiny one instead. Both
only multiply by what they read, so either will do; 1 does not look like an underflow.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_a3po.errors import A3poError

BLOCK = 128
FP8 = torch.float8_e4m3fn
SCALE_SUFFIX = "_scale_inv"
"""Appended to the weight's name."""
LARGEST = 448.0
"""In e4m3."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A factor below it would have lost bits of its own, and dividing by it could overflow."""
_VALUES_AT_ONCE = 1 << 22
"""How many values are worked on as float32 at a time."""
_QUANTIZED = re.compile(
    r"model\.layers\.\d+\.(self_attn|mlp(\.experts\.\d+|\.shared_experts)?)\."
    r"(q_proj|k_proj|v_proj|o_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|gate_proj|up_proj|down_proj)\.weight"
)


class UnusableWeights(A3poError):
    """Weights that FP8 cannot hold, or that are not what their scales belong to."""


def is_quantized(name: str, ndim: int) -> bool:
    """Whether a checkpoint in this format holds the tensor of this Hugging Face name in FP8.

    The linear weights of the layers are: attention (also latent), dense MLPs, experts and shared experts. All else is
    not: embeddings, output layer, norms, routers, biases, sinks, what belongs to multi-token prediction besides its
    layer, and experts stored as one tensor (gpt-oss), for which the format has no scales.
    """
    return ndim == 2 and _QUANTIZED.fullmatch(name) is not None


def quantization_config(modules_to_not_convert: Sequence[str] = ()) -> dict[str, Any]:
    """`quantization_config` of config.json. `modules_to_not_convert`: linear modules of the layers that are not in FP8;
    the output layer, norms and routers need not be named, as in the published checkpoints of DeepSeek-V3."""
    settings: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    return settings | ({"modules_to_not_convert": list(modules_to_not_convert)} if modules_to_not_convert else {})


def scale_shape(rows: int, cols: int) -> tuple[int, int]:
    return -(-rows // BLOCK), -(-cols // BLOCK)


def quantize_blockwise(weight: Tensor, name: str = "the weight") -> tuple[Tensor, Tensor]:
    """weight: [rows, cols] float32, bfloat16, float16 or float64, on any device. Returns its FP8 values [rows, cols]
    float8_e4m3fn and scale_inv [ceil(rows/128), ceil(cols/128)] float32, on the same device.

    Raises UnusableWeights, with `name`, for NaN, infinities, another shape, and values that are in FP8 already.
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


def quantize_by_tiles(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(values, scale_inv) as of `quantize_blockwise`, in torch; a block with NaN or an infinity has a scale that is not
    finite, and values that mean nothing."""
    rows, cols = weight.shape
    values = torch.empty(rows, cols, dtype=FP8, device=weight.device)
    scales = torch.empty(scale_shape(rows, cols), dtype=torch.float32, device=weight.device)
    for piece, blocks in _row_pieces(rows, cols):
        tiles = _tiles(weight[piece].float())
        largest = tiles.abs().amax(dim=(1, 3))  # [block rows, block columns]; NaN if a value is
        # By a tensor: CUDA divides by a number through its reciprocal, and would give other bits than the CPU.
        scale = (largest / torch.full_like(largest, LARGEST)).clamp(min=SMALLEST_SCALE)
        scale = torch.where(largest == 0, 1.0, scale)
        # The quotient of the largest value may round to a little above 448, and is rounded to 448 here.
        values[piece] = _flat(tiles / scale[:, None, :, None], values[piece].shape).to(FP8)
        scales[blocks] = scale
    return values, scales


def dequantize_blockwise(values: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """values: [rows, cols] float8_e4m3fn; scale_inv: [ceil(rows/128), ceil(cols/128)] of any float dtype. Returns their
    products [rows, cols], computed in float32 and rounded to `dtype`. Raises UnusableWeights for shapes that differ."""
    if values.ndim != 2 or tuple(scale_inv.shape) != scale_shape(*values.shape):
        raise UnusableWeights(
            f"scales of shape {list(scale_inv.shape)} do not belong to values of shape {list(values.shape)}: "
            f"blocks are {BLOCK} x {BLOCK}"
        )
    rows, cols = values.shape
    weight = torch.empty(rows, cols, dtype=dtype, device=values.device)
    for piece, blocks in _row_pieces(rows, cols):
        tiles = _tiles(values[piece].float())
        weight[piece] = _flat(tiles * scale_inv[blocks].float()[:, None, :, None], weight[piece].shape).to(dtype)
    return weight


def _row_pieces(rows: int, cols: int) -> Iterator[tuple[slice, slice]]:
    """(rows, rows of blocks) of pieces of whole blocks, small enough that their float32 copies cost little memory."""
    if rows == 0 or cols == 0:
        return
    blocks = max(1, _VALUES_AT_ONCE // (BLOCK * cols))
    for block in range(0, -(-rows // BLOCK), blocks):
        yield slice(block * BLOCK, min(rows, (block + blocks) * BLOCK)), slice(block, block + blocks)


def _tiles(matrix: Tensor) -> Tensor:
    """[rows, cols] -> [block rows, 128, block columns, 128], with zeros where the last blocks are smaller."""
    rows, cols = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -cols % BLOCK, 0, -rows % BLOCK))
    return padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def _flat(tiles: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `_tiles`."""
    rows, cols = shape
    return tiles.reshape(tiles.shape[0] * BLOCK, tiles.shape[2] * BLOCK)[:rows, :cols]


def _num_not_finite(weight: Tensor) -> int:
    return sum(int((~weight[piece].float().isfinite()).sum()) for piece, _ in _row_pieces(*weight.shape))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Quantise matrices to FP8 in blocks of 128 x 128, in torch: the reference for the kernel on GPUs."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 128
FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3"""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A smaller factor would be a subnormal number, with fewer bits, and dividing by it could overflow."""
_VALUES_AT_ONCE = 1 << 22
"""How many values are in float32 at a time"""


def scale_shape(rows: int, cols: int) -> tuple[int, int]:
    """Return the shape of the scales of a matrix [rows, cols]."""
    return -(-rows // BLOCK), -(-cols // BLOCK)


def quantize_by_tiles(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values, scale_inv) as `quantize.quantize_blockwise` does, computed in torch.

    A block with NaN or an infinity gets a scale that is not finite, and meaningless values.
    """
    rows, cols = weight.shape
    values = torch.empty(rows, cols, dtype=FP8, device=weight.device)
    scales = torch.empty(scale_shape(rows, cols), dtype=torch.float32, device=weight.device)
    for piece, blocks in row_pieces(rows, cols):
        tiles = tiles_of(weight[piece].float())
        largest = tiles.abs().amax(dim=(1, 3))  # [block rows, block columns]; NaN if a value is
        # By a tensor: CUDA divides by a number through its reciprocal, and would give other bits than the CPU.
        scale = (largest / torch.full_like(largest, LARGEST)).clamp(min=SMALLEST_SCALE)
        scale = torch.where(largest == 0, 1.0, scale)
        # The quotient of the largest value may round to a little above 448, and is rounded to 448 here.
        values[piece] = flat(tiles / scale[:, None, :, None], values[piece].shape).to(FP8)
        scales[blocks] = scale
    return values, scales


def row_pieces(rows: int, cols: int) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, rows of blocks) of pieces of whole blocks whose float32 copies are small."""
    if rows == 0 or cols == 0:
        return
    blocks = max(1, _VALUES_AT_ONCE // (BLOCK * cols))
    for block in range(0, -(-rows // BLOCK), blocks):
        yield slice(block * BLOCK, min(rows, (block + blocks) * BLOCK)), slice(block, block + blocks)


def tiles_of(matrix: Tensor) -> Tensor:
    """Cut [rows, cols] into [block rows, 128, block columns, 128]; smaller blocks at the ends are filled with zeros."""
    rows, cols = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -cols % BLOCK, 0, -rows % BLOCK))
    return padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def flat(tiles: Tensor, shape: Sequence[int]) -> Tensor:
    """Invert `tiles_of`: return the matrix of this shape."""
    rows, cols = shape
    return tiles.reshape(tiles.shape[0] * BLOCK, tiles.shape[2] * BLOCK)[:rows, :cols]

"""Matrices in blocks of 128 x 128, and their quantisation to FP8 in torch, which the one on GPUs is compared with."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 128
FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""In e4m3."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A factor below it would have lost bits of its own, and dividing by it could overflow."""
_VALUES_AT_ONCE = 1 << 22
"""How many values are worked on as float32 at a time."""


def scale_shape(rows: int, cols: int) -> tuple[int, int]:
    return -(-rows // BLOCK), -(-cols // BLOCK)


def quantize_by_tiles(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(values, scale_inv) as of `quantize.quantize_blockwise`, in torch; a block with NaN or an infinity has a scale
    that is not finite, and values that mean nothing."""
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
    """(rows, rows of blocks) of pieces of whole blocks, small enough that their float32 copies cost little memory."""
    if rows == 0 or cols == 0:
        return
    blocks = max(1, _VALUES_AT_ONCE // (BLOCK * cols))
    for block in range(0, -(-rows // BLOCK), blocks):
        yield slice(block * BLOCK, min(rows, (block + blocks) * BLOCK)), slice(block, block + blocks)


def tiles_of(matrix: Tensor) -> Tensor:
    """[rows, cols] -> [block rows, 128, block columns, 128], with zeros where the last blocks are smaller."""
    rows, cols = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -cols % BLOCK, 0, -rows % BLOCK))
    return padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def flat(tiles: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `tiles_of`."""
    rows, cols = shape
    return tiles.reshape(tiles.shape[0] * BLOCK, tiles.shape[2] * BLOCK)[:rows, :cols]

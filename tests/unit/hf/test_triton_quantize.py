"""The Triton kernel that quantises weights, run by Triton's interpreter, against the bits of torch on the CPU.

Those are compared with a loop in float64 in test_quantize.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_a3po.errors import PublishError
from megatron_a3po.hf.fp8_blocks import FP8, quantize_by_tiles

_NOT_FINITE = ("nan", "inf", "-inf")


def _cases() -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for rows, cols in ((1, 1), (128, 256), (300, 130)):
        weight = torch.randn(rows, cols, generator=generator)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            yield f"{rows} x {cols} {dtype}", weight.to(dtype)
        yield f"{rows} x {cols} transposed", weight.t()
    weight = torch.randn(300, 300, generator=generator)
    weight[:128, :128] = 0
    weight[128:256, :128] *= 1e-39  # subnormal in float32
    weight[:128, 128:256] *= 1e37
    weight[:, 256:] = -0.0
    yield "zeros, tiny and huge blocks", weight
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    every = every[every.abs() <= 448]
    every = every[: len(every) // 127 * 127].view(-1, 127)
    yield "numbers of bfloat16 on a scale of 1", torch.nn.functional.pad(every, (0, 1), value=448.0)
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    ties = (codes[1:] + codes[:-1]) / 2
    around = [torch.nextafter(ties, torch.tensor(limit)) for limit in (0.0, 448.0)]
    yield "halves between two codes, and their neighbours", torch.stack([ties, -ties, *around, codes[1:]])


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr  # also the check that a publisher makes
    found: dict[str, Any] = json.loads(process.stdout)
    return found


def test_codes_and_scales_are_those_of_the_cpu_to_the_bit(interpreted: dict[str, Any]) -> None:
    assert len(interpreted["different"]) == 18
    assert {case: counts for case, counts in interpreted["different"].items() if counts != [0, 0]} == {}


def test_only_a_block_with_nan_or_an_infinity_has_no_finite_scale(interpreted: dict[str, Any]) -> None:
    assert interpreted["finite"] == {value: [[True, True, True], [True, False, True]] for value in _NOT_FINITE}


def test_the_check_finds_one_wrong_code_and_one_wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_a3po.hf import triton_quantize

    def wrong(code: bool, weight: Tensor) -> tuple[Tensor, Tensor]:
        values, scales = quantize_by_tiles(weight)
        if code:
            values.view(torch.uint8)[299, 199] ^= 1
        else:
            scales[1, 1] = torch.nextafter(scales[1, 1], torch.tensor(1e9))
        return values, scales

    for code, what in ((True, "1 of 60000 values and 0 of 6"), (False, "0 of 60000 values and 1 of 6")):
        monkeypatch.setattr(triton_quantize, "quantize_by_kernel", partial(wrong, code))
        with pytest.raises(PublishError, match=f"{what} .*cpu"):
            triton_quantize.check_kernel(torch.device("cpu"))


@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
def test_compiled_for_hopper_divisions_are_rounded_correctly_and_nothing_is_flushed_to_zero(pointer: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_a3po.hf.triton_quantize import _quantize_kernel

    sizes = dict.fromkeys(("rows", "cols", "row_stride", "col_stride"), "i32")
    signature = {"weight": pointer, "values": "*u8", "scales": "*fp32"} | sizes
    source = ASTSource(_quantize_kernel, signature=signature)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]

    assert "div.rn.f32" in ptx
    assert all(inexact not in ptx for inexact in ("div.full", "div.approx", "rcp.approx", ".ftz"))


def _main() -> None:
    from megatron_a3po.hf.triton_quantize import check_kernel, quantize_by_kernel

    check_kernel(torch.device("cpu"))
    different, finite = {}, {}
    for name, weight in _cases():
        (values, scales), (expected_values, expected_scales) = quantize_by_kernel(weight), quantize_by_tiles(weight)
        wrong_values = (values.view(torch.uint8) != expected_values.view(torch.uint8)).sum()
        different[name] = [int(wrong_values), int((scales != expected_scales).sum())]
    for value in _NOT_FINITE:
        weight = torch.ones(200, 300)
        weight[199, 200] = float(value)
        finite[value] = quantize_by_kernel(weight)[1].isfinite().tolist()
    print(json.dumps({"different": different, "finite": finite}))


if __name__ == "__main__":
    _main()

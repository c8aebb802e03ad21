"""Block-wise FP8 on a GPU: the bits that the CPU gives, which the unit tests compare with a loop in float64."""

import math

import pytest
import torch

from megatron_a3po.hf.fp8_blocks import quantize_by_tiles
from megatron_a3po.hf.quantize import UnusableWeights, dequantize_blockwise, quantize_blockwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (300, 130), (4096, 1536)])
def test_values_scales_and_what_they_stand_for_are_the_cpus(dtype: torch.dtype, rows: int, cols: int) -> None:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[:128, 128:256] = 0
    weight[128:256, :128] *= 2.0**-20  # in float16 subnormal

    values, scales = quantize_blockwise(weight)
    on_gpu = weight.cuda()
    by_kernel, by_torch = quantize_blockwise(on_gpu), quantize_by_tiles(on_gpu)
    transposed, _ = quantize_blockwise(weight.t().contiguous().cuda().t())

    for values_gpu, scales_gpu in (by_kernel, by_torch):
        assert values_gpu.is_cuda and scales_gpu.is_cuda
        assert torch.equal(scales_gpu.cpu(), scales)
        assert torch.equal(values_gpu.cpu().view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(dequantize_blockwise(values_gpu, scales_gpu).cpu(), dequantize_blockwise(values, scales))
    assert torch.equal(transposed.cpu().view(torch.uint8), values.view(torch.uint8))


def test_the_kernel_passes_the_check_that_a_publisher_makes() -> None:
    from megatron_a3po.hf.triton_quantize import check_kernel

    check_kernel(torch.device("cuda"))


def test_the_kernel_needs_less_memory_than_a_copy_in_float32() -> None:
    weight = torch.randn(8192, 4096, device="cuda").bfloat16()
    quantize_blockwise(weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    values, scales = quantize_blockwise(weight)
    peak = torch.cuda.max_memory_allocated() - before

    assert peak <= 1.1 * (values.nbytes + scales.nbytes)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_are_refused(value: float) -> None:
    weight = torch.ones(4, 4, device="cuda")
    weight[1, 2] = value
    with pytest.raises(UnusableWeights, match="1 of 16 values are NaN or infinite"):
        quantize_blockwise(weight)

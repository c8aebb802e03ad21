"""Block-wise FP8 on a GPU: the bits that the CPU gives, which the unit tests compare with a loop in float64."""

import math

import pytest
import torch

from megatron_a3po.hf.quantize import UnusableWeights, dequantize_blockwise, quantize_blockwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (300, 130), (4096, 1536)])
def test_values_scales_and_what_they_stand_for_are_the_cpus(dtype: torch.dtype, rows: int, cols: int) -> None:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[:128, 128:256] = 0

    values, scales = quantize_blockwise(weight)
    values_gpu, scales_gpu = quantize_blockwise(weight.cuda())

    assert values_gpu.is_cuda and scales_gpu.is_cuda
    assert torch.equal(scales_gpu.cpu(), scales)
    assert torch.equal(values_gpu.cpu().view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(dequantize_blockwise(values_gpu, scales_gpu).cpu(), dequantize_blockwise(values, scales))


def test_nan_is_refused() -> None:
    weight = torch.ones(4, 4, device="cuda")
    weight[1, 2] = math.nan
    with pytest.raises(UnusableWeights, match="1 of 16 values are NaN or infinite"):
        quantize_blockwise(weight)

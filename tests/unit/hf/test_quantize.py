"""Block-wise FP8: against a loop over blocks and values in float64, and against what transformers makes of it."""

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_a3po.hf import fp8_blocks
from megatron_a3po.hf.quantize import (
    SCALE_SUFFIX,
    UnusableWeights,
    dequantize_blockwise,
    is_quantized,
    quantization_config,
    quantize_blockwise,
)
from tests.support.tiny_models import FAMILIES, save_tiny_model

E4M3 = [
    (2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8)
    for exponent, mantissa in product(range(16), range(8))
][:127]
"""The magnitudes of e4m3 by its definition (arXiv 2209.05433, table 1): the last code is NaN."""
NUMBERS = torch.tensor([-number for number in reversed(E4M3)] + E4M3, dtype=torch.float64)


def blocks(rows: int, cols: int) -> list[tuple[int, int, slice, slice]]:
    return [
        (i, j, slice(128 * i, min(rows, 128 * i + 128)), slice(128 * j, min(cols, 128 * j + 128)))
        for i, j in product(range(math.ceil(rows / 128)), range(math.ceil(cols / 128)))
    ]


def assert_nearest(weight: Tensor, values: Tensor, scales: Tensor) -> None:
    """Every block has its scale, and every value is the nearest of all FP8 numbers to weight / scale."""
    for i, j, rows, cols in blocks(*weight.shape):
        block, scale = weight[rows, cols].double(), float(scales[i, j])
        largest = float(block.abs().max())
        assert scale == (pytest.approx(max(largest / 448, 2.0**-126), rel=2e-7) if largest else 1.0)
        exact = (block / scale).flatten()
        right = torch.searchsorted(NUMBERS, exact).clamp(1, len(NUMBERS) - 1)
        smallest_error = torch.minimum((NUMBERS[right] - exact).abs(), (NUMBERS[right - 1] - exact).abs())
        errors = (values[rows, cols].double().flatten() - exact).abs()
        assert (errors <= smallest_error + 2e-7 * exact.abs()).all()
        # What follows for the weights: half a step of three bits, or of the smallest numbers.
        restored = values[rows, cols].double() * scale
        assert ((restored - block).abs() <= block.abs() / 16 + scale * 2.0**-10).all()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 300),
    cols=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    exponent=st.integers(-12, 12),
    seed=st.integers(0, 99),
)
def test_every_value_is_the_nearest_number_of_its_block(
    rows: int, cols: int, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, cols, generator=generator) * 2.0**exponent).to(dtype)
    weight[:, ::3] *= 1e-3  # some of them below the smallest number of normal precision

    values, scales = quantize_blockwise(weight)

    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, weight.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (math.ceil(rows / 128), math.ceil(cols / 128)))
    assert_nearest(weight, values, scales)


def test_working_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(700, 130, generator=torch.Generator().manual_seed(0))
    whole = quantize_blockwise(weight)
    monkeypatch.setattr(fp8_blocks, "_VALUES_AT_ONCE", 2 * 128 * 130)
    pieces = quantize_blockwise(weight)

    assert torch.equal(whole[0].view(torch.uint8), pieces[0].view(torch.uint8)) and torch.equal(whole[1], pieces[1])
    assert torch.equal(dequantize_blockwise(*whole), dequantize_blockwise(*pieces))


def test_values_that_fp8_has_come_back_exactly() -> None:
    choice = torch.randint(len(NUMBERS), (256, 200), generator=torch.Generator().manual_seed(0))
    weight = NUMBERS[choice].float()
    weight[::128, ::128] = 448.0
    weight[:128] *= 2.0**-9
    weight[128:] *= 2.0**5

    values, scales = quantize_blockwise(weight)

    assert scales.tolist() == [[2.0**-9] * 2, [2.0**5] * 2]
    assert torch.equal(dequantize_blockwise(values, scales, torch.float32), weight)
    assert torch.equal(dequantize_blockwise(values, scales), weight.bfloat16())  # four significant bits fit


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 260), cols=st.integers(1, 260), seed=st.integers(0, 99))
def test_any_bytes_and_scales_are_multiplied_block_by_block(rows: int, cols: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bytes_ = torch.randint(255, (rows, cols), generator=generator, dtype=torch.uint8)
    bytes_[(bytes_ & 127) == 127] = 0  # NaN
    scales = torch.rand(math.ceil(rows / 128), math.ceil(cols / 128), generator=generator)
    values = bytes_.view(torch.float8_e4m3fn)

    restored = dequantize_blockwise(values, scales, torch.float32)

    expected = torch.zeros(rows, cols, dtype=torch.float64)
    for i, j, row, col in blocks(rows, cols):
        expected[row, col] = values[row, col].double() * float(scales[i, j])
    assert torch.equal(restored, expected.float())
    assert torch.equal(
        dequantize_blockwise(values, scales.bfloat16()), dequantize_blockwise(values, scales.bfloat16().float())
    )


def test_zeros_and_the_smallest_and_largest_numbers_survive() -> None:
    weight = torch.zeros(384, 128)
    weight[128, 0], weight[256:] = 1e-45, torch.finfo(torch.float32).max
    weight[256, 0] *= -1
    values, scales = quantize_blockwise(weight)

    assert scales[:2, 0].tolist() == [1.0, torch.finfo(torch.float32).tiny]
    assert (values.float()[:128] == 0).all() and torch.isfinite(dequantize_blockwise(values[:256], scales[:2])).all()
    assert values.float()[256:].abs().unique().tolist() == [448.0] and values[256, 0].float() == -448.0


def test_empty_matrices_have_empty_blocks() -> None:
    for shape in ((0, 0), (0, 128), (128, 0)):
        values, scales = quantize_blockwise(torch.empty(shape))

        assert values.shape == shape and scales.shape == (shape[0] // 128, shape[1] // 128)
        assert dequantize_blockwise(values, scales).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinities_are_refused_with_their_number_and_name(dtype: torch.dtype) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        weight = torch.ones(300, 130, dtype=dtype)
        weight[299, 129] = weight[0, 7] = bad
        with pytest.raises(UnusableWeights, match=r"q_proj\.weight: 2 of 39,000 values"):
            quantize_blockwise(weight, "model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize(
    ("weight", "problem"),
    [
        (torch.zeros(4), r"\[4\] float32"),
        (torch.zeros(2, 2, 2), r"\[2, 2, 2\] float32"),
        (torch.zeros(2, 2, dtype=torch.int8), "int8"),
        (torch.zeros(2, 2, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.tensor([[1e300]], dtype=torch.float64), "1 of 1 values"),
    ],
)
def test_what_is_no_matrix_of_numbers_within_float32_is_refused(weight: Tensor, problem: str) -> None:
    with pytest.raises(UnusableWeights, match=problem):
        quantize_blockwise(weight)


def test_scales_of_another_shape_are_refused() -> None:
    for scales in (torch.ones(2, 1), torch.ones(1, 2, 1), torch.ones(1)):
        with pytest.raises(UnusableWeights, match="shape"):
            dequantize_blockwise(torch.zeros(128, 200, dtype=torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_modules_that_transformers_expects_in_fp8_are_those(family: str, tmp_path: Path) -> None:
    import transformers
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    save_tiny_model(family, tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    settings = transformers.FineGrainedFP8Config(**quantization_config())
    quantizer = FineGrainedFP8HfQuantizer(settings, pre_quantized=True)
    skipped = quantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    # transformers has no FP8 experts with biases.
    skipped = [*skipped, "experts"] if family == "gpt_oss" else skipped
    replace_with_fp8_linear(model, skipped, settings, pre_quantized=True)
    expected = {f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "FP8Linear"}

    stored = load_file(tmp_path / "model.safetensors")
    chosen = {name for name, tensor in stored.items() if is_quantized(name, tensor.ndim)}

    assert expected and {name for name in chosen if ".experts." not in name} == expected
    # Of routed experts, transformers has one module, and the file one matrix each (but for gpt-oss).
    matrices = {name for name, tensor in stored.items() if ".mlp.experts." in name and tensor.ndim == 2}
    assert {name for name in chosen if ".mlp.experts." in name} == (matrices if family != "gpt_oss" else set())


OTHERS = """
    model.embed_tokens.weight lm_head.weight model.norm.weight
    model.layers.0.input_layernorm.weight model.layers.0.self_attn.q_norm.weight
    model.layers.0.self_attn.kv_a_layernorm.weight model.layers.0.self_attn.q_proj.bias model.layers.0.self_attn.sinks
    model.layers.0.mlp.gate.weight model.layers.0.mlp.gate.e_score_correction_bias model.layers.0.mlp.router.weight
    model.layers.0.mlp.experts.gate_up_proj model.layers.0.mlp.up_proj.weight_scale_inv
    model.layers.61.eh_proj.weight model.layers.61.shared_head.head.weight
"""


@pytest.mark.parametrize("name", OTHERS.split())
def test_what_is_no_linear_weight_of_a_layer_stays(name: str) -> None:
    assert not is_quantized(name, 2)


def test_the_configuration_is_the_published_one() -> None:
    """The one in config.json of deepseek-ai/DeepSeek-V3."""
    published = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    assert quantization_config() == published
    assert quantization_config(["a.b"]) == published | {"modules_to_not_convert": ["a.b"]}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_transformers_loads_a_quantised_folder_as_the_weights_that_it_stands_for(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_tiny_model(family, tmp_path)
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    stored: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        stored[name] = expected[name] = tensor
        if is_quantized(name, tensor.ndim):
            stored[name], stored[name + SCALE_SUFFIX] = quantize_blockwise(tensor, name)
            expected[name] = dequantize_blockwise(stored[name], stored[name + SCALE_SUFFIX], torch.float32)
    save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.quantization_config = quantization_config()
    config.save_pretrained(tmp_path)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()

    assert loaded.keys() == reference.keys() and len(stored) > len(expected)
    for name, tensor in loaded.items():
        assert torch.equal(tensor.float(), reference[name]), name

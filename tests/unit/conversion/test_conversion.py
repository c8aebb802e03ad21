"""Hugging Face folders and Megatron's weights, from one to the other and back, bit for bit."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_a3po.errors import CheckpointError, ConfigError
from megatron_a3po.hf.quantize import dequantize_blockwise, quantize_blockwise
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.weights.served_precision import fp8_rule
from tests.distributed.conversion_cases import differing_tensors
from tests.support.tiny_models import FAMILIES
from tests.unit.conversion.conftest import Converter, model_config

Both = Callable[[str], tuple[Path, Path]]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_bit_of_every_family_comes_back(family: str, both: Both, converter: Converter, tmp_path: Path) -> None:
    hf, megatron = both(family)
    back = converter.to_hf(megatron, tmp_path / "back")

    assert differing_tensors(hf, back) == []
    assert model_config(back) == model_config(hf)
    assert {path.name for folder in (megatron, back) for path in folder.parent.iterdir()} == {"hf", "megatron", "back"}


def test_the_parameters_are_those_that_megatron_trains(both: Both) -> None:
    """Keys, whole shapes and values of a gate/up projection, a qkv projection and a norm, by hand."""
    model, megatron = both("qwen3")
    stored = _stored(megatron / "weights")
    hf = load_file(model / "model.safetensors")
    layer = "model.layers.2."

    gate, up = (hf[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(stored["decoder.layers.mlp.linear_fc1.weight"][2], torch.cat([gate, up]))
    q, k, v = (hf[f"{layer}self_attn.{name}_proj.weight"].view(2, -1, 64) for name in "qkv")  # two groups of queries
    assert torch.equal(
        stored["decoder.layers.self_attention.linear_qkv.weight"][2], torch.cat([q, k, v], 1).flatten(0, 1)
    )
    norm = stored["decoder.layers.self_attention.linear_qkv.layer_norm_weight"][2]
    assert torch.equal(norm, hf[f"{layer}input_layernorm.weight"])
    assert stored["output_layer.weight"].shape == (259, 64)


def test_a_folder_of_blockwise_fp8_weights_is_converted_as_the_weights_it_stands_for(
    model: Path, converter: Converter, tmp_path: Path
) -> None:
    plain = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(plain, model / "model.safetensors", {"format": "pt"})
    fp8 = converter.to_hf(converter.to_megatron(model, tmp_path / "megatron"), tmp_path / "fp8", fp8=True)
    quantised = {name for name in load_file(fp8 / "model.safetensors") if name.endswith("_scale_inv")}
    assert len(quantised) == 4 * 7
    assert model_config(fp8)["quantization_config"]["weight_block_size"] == [128, 128]

    again = converter.to_megatron(fp8, tmp_path / "again")
    assert "quantization_config" not in model_config(again), "a server would be started in FP8"
    bf16 = converter.to_hf(again, tmp_path / "bf16")
    assert "quantization_config" not in model_config(bf16)
    for name, tensor in load_file(bf16 / "model.safetensors").items():
        expected = plain[name]
        if f"{name}_scale_inv" in quantised:
            expected = dequantize_blockwise(*quantize_blockwise(expected), torch.bfloat16)
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt_oss"])
def test_config_json_names_the_linear_modules_that_are_not_in_fp8(
    family: str, both: Both, converter: Converter, tmp_path: Path
) -> None:
    """Those that Transformers then takes for FP8 are those that are, and so are those that are published to servers."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    fp8 = converter.to_hf(both(family)[1], tmp_path / "fp8", fp8=True)
    written = load_file(fp8 / "model.safetensors")
    described = model_config(fp8)["quantization_config"]
    kept = described["modules_to_not_convert"]
    matrices = {name for name, tensor in written.items() if tensor.ndim == 2 and name.endswith(".weight")}
    modules = {name.removesuffix(".weight") for name in matrices} - {"model.embed_tokens"}
    in_fp8 = {name for name in modules if written[f"{name}.weight"].dtype == torch.float8_e4m3fn}
    assert set(kept) == (modules - in_fp8) | {"lm_head"}
    assert {name for name in modules if should_convert_module(name, kept)} == in_fp8
    is_fp8 = fp8_rule(described)
    specs = {name: TensorSpec(name=f"{name}.weight", dtype=torch.bfloat16, shape=(1, 1)) for name in modules}
    assert {name for name, spec in specs.items() if is_fp8(spec)} == in_fp8


def test_stacked_experts_are_not_written_in_fp8(both: Both, converter: Converter, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"GptOssForCausalLM.*without --fp8"):
        converter.to_hf(both("gpt_oss")[1], tmp_path / "fp8", fp8=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("intermediate_size", [64, 96])
def test_experts_in_mxfp4_become_the_bfloat16_values_that_they_stand_for(
    intermediate_size: int, both: Both, converter: Converter, tmp_path: Path
) -> None:
    """Also where an expert is square, and its shape does not tell which way its axes lie."""
    from transformers import AutoModelForCausalLM

    expected = _save_in_mxfp4(both("gpt_oss")[0], tmp_path / "hf", intermediate_size)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).state_dict()
    megatron = converter.to_megatron(tmp_path / "hf", tmp_path / "megatron")
    found = load_file(converter.to_hf(megatron, tmp_path / "back") / "model.safetensors")
    assert found.keys() == expected.keys() == theirs.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), name
        assert torch.equal(tensor.view(torch.int16), theirs[name].view(torch.int16)), name
    assert converter.compare(tmp_path / "hf", megatron) > 0


def test_sizes_are_of_what_is_written_not_of_what_is_packed(
    both: Both, converter: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_a3po.conversion.to_megatron._FILE_BYTES", 200_000)
    monkeypatch.setattr("megatron_a3po.conversion.to_megatron._SPARE_BYTES", 0)
    expected = _save_in_mxfp4(both("gpt_oss")[0], tmp_path / "hf", 64)
    num_bytes = sum(tensor.nbytes for tensor in expected.values())
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=num_bytes // 4))
        with pytest.raises(CheckpointError, match=f"{num_bytes // 4:,} bytes .*free space") as raised:
            converter.to_megatron(tmp_path / "hf", tmp_path / "megatron")
    needed = re.search(r"needs ([0-9,]+) bytes", str(raised.value))
    assert needed is not None
    assert num_bytes - 100 <= int(needed[1].replace(",", "")) <= num_bytes  # a note of what is converted is there
    assert not list(tmp_path.rglob("*.distcp"))

    converter.to_megatron(tmp_path / "hf", tmp_path / "megatron")
    sizes = [file.stat().st_size for file in (tmp_path / "megatron" / "weights").glob("__[0-9]*.distcp")]
    assert sum(sizes) >= num_bytes and max(sizes) <= 300_000  # each expert has a header of over a kilobyte


def test_verification_finds_a_tensor_that_differs_in_one_bit(model: Path, both: Both, converter: Converter) -> None:
    megatron = both("qwen3")[1]
    assert converter.compare(model, megatron) == 47

    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"].view(torch.int32)[0, 0] ^= 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors, such as model\.layers\.3\.mlp\.down_proj\.weight"):
        converter.compare(model, megatron)


def _save_in_mxfp4(gpt_oss: Path, folder: Path, intermediate_size: int) -> dict[str, torch.Tensor]:
    """Random experts as openai/gpt-oss-20b stores its own. Returns the bfloat16 tensors of Hugging Face's model."""
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(gpt_oss / "model.safetensors").items()}
    stored = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    expected = dict(stored)
    generator = torch.Generator().manual_seed(0)
    for layer, (name, rows, cols) in itertools.product(
        range(4), [("gate_up_proj", 2 * intermediate_size, 64), ("down_proj", 64, intermediate_size)]
    ):
        key = f"model.layers.{layer}.mlp.experts.{name}"
        stored[f"{key}_bias"] = expected[f"{key}_bias"] = torch.randn(8, rows, generator=generator).bfloat16()
        codes = torch.randint(16, (8, rows, cols), generator=generator)
        scales = torch.randint(110, 130, (8, rows, cols // 32), generator=generator)
        stored[f"{key}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8).unflatten(-1, (-1, 16))
        stored[f"{key}_scales"] = scales.to(torch.uint8)
        values = _e2m1(codes) * (scales - 127.0).exp2().repeat_interleave(32, -1)
        expected[key] = values.bfloat16().transpose(1, 2).contiguous()
    folder.mkdir()
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    fields = {"intermediate_size": intermediate_size, "dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(model_config(gpt_oss) | fields))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return expected


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The numbers of OCP's Microscaling Formats 1.0, section 5.3.3: sign, two bits of exponent (bias 1), one of
    mantissa; float64."""
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, (codes & 1).double()
    magnitude = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * (exponent - 1.0).double().exp2())
    return torch.where(sign == 1, -magnitude, magnitude)


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a torch_dist checkpoint, by torch's own reader."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {key: torch.empty(entry.size) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state

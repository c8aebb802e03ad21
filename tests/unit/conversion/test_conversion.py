"""Hugging Face folders and Megatron's weights, from one to the other and back, on one process."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizers_utils import should_convert_module

from megatron_a3po import cpu
from megatron_a3po.errors import A3poError, CheckpointError, ConfigError
from megatron_a3po.hf.quantize import dequantize_blockwise, quantize_blockwise
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.weights.served_precision import fp8_rule
from tests.distributed.conversion_cases import differing_tensors
from tests.support.tiny_models import FAMILIES, save_tiny_model

cpu.install()

from megatron.core import parallel_state  # noqa: E402

from megatron_a3po.actor import start_weights  # noqa: E402
from megatron_a3po.conversion import to_megatron, unfinished, verify  # noqa: E402
from megatron_a3po.conversion.processes import Processes  # noqa: E402
from megatron_a3po.conversion.to_hf import MegatronSource, convert_to_hf, find_source  # noqa: E402
from megatron_a3po.conversion.to_megatron import convert_to_megatron  # noqa: E402


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    parallel_state.initialize_model_parallel(1, 1, expert_tensor_parallel_size=1, create_gloo_process_groups=False)
    yield Processes(rank=0, world_size=1, group=dist.group.WORLD)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def model(family: str) -> Path:
        if not (root / family).exists():
            save_tiny_model(family, root / family)
        return root / family

    return model


@pytest.fixture
def model(models: Callable[[str], Path], tmp_path: Path) -> Path:
    """A folder that the test may damage."""
    return Path(shutil.copytree(models("qwen3"), tmp_path / "hf"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_bit_of_every_family_comes_back(
    family: str, models: Callable[[str], Path], processes: Processes, tmp_path: Path
) -> None:
    convert_to_megatron(models(family), tmp_path / "megatron", processes)
    convert_to_hf(find_source(tmp_path / "megatron", None), tmp_path / "back", processes, fp8=False)

    assert differing_tensors(models(family), tmp_path / "back") == []
    assert _config(tmp_path / "back") == _config(models(family))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "megatron"]


def test_the_parameters_are_those_that_megatron_trains(
    models: Callable[[str], Path], processes: Processes, tmp_path: Path
) -> None:
    """Keys, whole shapes and values of a gate/up projection, a qkv projection and a norm, by hand."""
    convert_to_megatron(models("qwen3"), tmp_path / "megatron", processes)
    stored = _stored(tmp_path / "megatron" / "weights")
    hf = load_file(models("qwen3") / "model.safetensors")
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
    model: Path, processes: Processes, tmp_path: Path
) -> None:
    plain = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(plain, model / "model.safetensors", {"format": "pt"})
    convert_to_megatron(model, tmp_path / "megatron", processes)
    source = find_source(tmp_path / "megatron", None)

    convert_to_hf(source, tmp_path / "fp8", processes, fp8=True)
    written = load_file(tmp_path / "fp8" / "model.safetensors")
    quantised = {name for name in written if name.endswith("_scale_inv")}
    assert len(quantised) == 4 * 7
    assert _config(tmp_path / "fp8")["quantization_config"]["weight_block_size"] == [128, 128]

    convert_to_megatron(tmp_path / "fp8", tmp_path / "again", processes)
    assert "quantization_config" not in _config(tmp_path / "again"), "a server would be started in FP8"
    convert_to_hf(find_source(tmp_path / "again", None), tmp_path / "bf16", processes, fp8=False)
    assert "quantization_config" not in _config(tmp_path / "bf16")
    for name, tensor in load_file(tmp_path / "bf16" / "model.safetensors").items():
        expected = plain[name]
        if f"{name}_scale_inv" in quantised:
            expected = dequantize_blockwise(*quantize_blockwise(expected), torch.bfloat16)
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt_oss"])
def test_config_json_names_the_linear_modules_that_are_not_in_fp8(
    family: str, models: Callable[[str], Path], processes: Processes, tmp_path: Path
) -> None:
    """Those that Transformers then takes for FP8 are those that are, and so are those that are published to servers."""
    convert_to_megatron(models(family), tmp_path / "megatron", processes)
    convert_to_hf(find_source(tmp_path / "megatron", None), tmp_path / "fp8", processes, fp8=True)

    written = load_file(tmp_path / "fp8" / "model.safetensors")
    kept = _config(tmp_path / "fp8")["quantization_config"]["modules_to_not_convert"]
    matrices = {name for name, tensor in written.items() if tensor.ndim == 2 and name.endswith(".weight")}
    modules = {name.removesuffix(".weight") for name in matrices} - {"model.embed_tokens"}
    in_fp8 = {name for name in modules if written[f"{name}.weight"].dtype == torch.float8_e4m3fn}
    assert set(kept) == (modules - in_fp8) | {"lm_head"}
    assert {name for name in modules if should_convert_module(name, kept)} == in_fp8
    is_fp8 = fp8_rule(_config(tmp_path / "fp8")["quantization_config"])
    specs = {name: TensorSpec(name=f"{name}.weight", dtype=torch.bfloat16, shape=(1, 1)) for name in modules}
    assert {name for name, spec in specs.items() if is_fp8(spec)} == in_fp8


def test_stacked_experts_are_not_written_in_fp8(
    models: Callable[[str], Path], processes: Processes, tmp_path: Path
) -> None:
    convert_to_megatron(models("gpt_oss"), tmp_path / "megatron", processes)
    with pytest.raises(ConfigError, match=r"GptOssForCausalLM cannot be written in FP8.*convert without --fp8"):
        convert_to_hf(find_source(tmp_path / "megatron", None), tmp_path / "fp8", processes, fp8=True)
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]


@pytest.mark.parametrize("intermediate_size", [64, 96])
def test_experts_in_mxfp4_become_the_bfloat16_values_that_they_stand_for(
    intermediate_size: int, models: Callable[[str], Path], processes: Processes, tmp_path: Path
) -> None:
    """Also where an expert is square, and its shape does not tell which way its axes lie."""
    expected = _save_in_mxfp4(models("gpt_oss"), tmp_path / "hf", intermediate_size)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).state_dict()
    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", processes)
    convert_to_hf(find_source(tmp_path / "megatron", None), tmp_path / "back", processes, fp8=False)

    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys() == theirs.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), name
        assert torch.equal(tensor.view(torch.int16), theirs[name].view(torch.int16)), name
    assert verify._compare_tensors(tmp_path / "hf", tmp_path / "megatron" / "weights", processes, fp8=False) > 0


def test_sizes_are_of_what_is_written_not_of_what_is_packed(
    models: Callable[[str], Path], processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_megatron, "_FILE_BYTES", 200_000)
    monkeypatch.setattr(to_megatron, "_SPARE_BYTES", 0)
    expected = _save_in_mxfp4(models("gpt_oss"), tmp_path / "hf", 64)
    num_bytes = sum(tensor.nbytes for tensor in expected.values())
    with monkeypatch.context() as patched:
        patched.setattr(unfinished.shutil, "disk_usage", lambda _: SimpleNamespace(free=num_bytes // 4))
        with pytest.raises(CheckpointError) as raised:
            convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", processes)
    needed = re.search(r"needs ([0-9,]+) bytes", str(raised.value))
    assert needed is not None
    assert num_bytes - 100 <= int(needed[1].replace(",", "")) <= num_bytes  # a note of what is converted is there

    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", processes)
    sizes = [file.stat().st_size for file in (tmp_path / "megatron" / "weights").glob("__[0-9]*.distcp")]
    assert sum(sizes) >= num_bytes and max(sizes) <= 300_000  # each expert has a header of over a kilobyte


@pytest.mark.parametrize("change_source", [False, True])
def test_an_interrupted_conversion_goes_on_where_it_was_unless_its_source_changed(
    model: Path, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_source: bool
) -> None:
    monkeypatch.setattr(to_megatron, "_FILE_BYTES", 64 * 1024)
    write, written = to_megatron.write_pieces, []

    def write_three(file: Path, tensors: Any) -> Any:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(file.name)
        return write(file, tensors)

    monkeypatch.setattr(to_megatron, "write_pieces", write_three)
    with pytest.raises(KeyboardInterrupt):
        convert_to_megatron(model, tmp_path / "megatron", processes)
    assert not (tmp_path / "megatron").exists()
    monkeypatch.setattr(
        to_megatron, "write_pieces", lambda file, tensors: written.append(file.name) or write(file, tensors)
    )
    if change_source:
        os.utime(model / "model.safetensors", (1, 1))
    convert_to_megatron(model, tmp_path / "megatron", processes)
    assert (len(written) > len(set(written))) == change_source
    convert_to_hf(find_source(tmp_path / "megatron", None), tmp_path / "back", processes, fp8=False)
    assert differing_tensors(model, tmp_path / "back") == []


def _drop(name: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        del tensors[name]
        save_file(tensors, model / "model.safetensors", {"format": "pt"})

    return change


def _halve(name: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        save_file(tensors | {name: tensors[name].bfloat16()}, model / "model.safetensors", {"format": "pt"})

    return change


def _add(name: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        save_file(tensors | {name: torch.zeros(3)}, model / "model.safetensors", {"format": "pt"})

    return change


def _set(**fields: Any) -> Callable[[Path], None]:
    return lambda model: (model / "config.json").write_text(json.dumps(_config(model) | fields)) and None


def _cut(model: Path) -> None:
    os.truncate(model / "model.safetensors", 5000)


MISTAKES = {
    "an unknown architecture": (
        _set(architectures=["MambaForCausalLM"]),
        "MambaForCausalLM.*use one of Qwen2ForCausalLM",
    ),
    "a variant": (_set(attention_bias=True), "attention_bias = True"),
    "a missing tensor": (_drop("model.layers.1.mlp.up_proj.weight"), r"misses model\.layers\.1\.mlp\.up_proj\.weight"),
    "more layers than config.json describes": (_set(num_hidden_layers=3, layer_types=None), r"model\.layers\.3"),
    "layers of two dtypes": (_halve("model.layers.1.mlp.up_proj.weight"), "up_proj.weight is torch.bfloat16 and"),
    "a config.json that is none": (lambda model: (model / "config.json").write_text("[") and None, "config.json"),
    "heads that do not divide": (_set(num_key_value_heads=3), "config.json: no model can be built from it"),
    "a superfluous tensor": (_add("model.layers.1.mlp.extra.weight"), "no place for: model.layers.1.mlp.extra.weight"),
    "another model's config.json": (
        _set(intermediate_size=80),
        r"down_proj\.weight is \[64, 96\] instead of \[64, 80\]",
    ),
    "a file that is cut off": (_cut, "model.safetensors.*copy or download it again"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_source_that_is_not_whole_or_not_supported_is_refused_with_a_remedy(
    mistake: str, model: Path, processes: Processes, tmp_path: Path
) -> None:
    damage, message = MISTAKES[mistake]
    damage(model)
    with pytest.raises(A3poError, match=message):
        convert_to_megatron(model, tmp_path / "megatron", processes)
    assert not (tmp_path / "megatron").exists()


def test_tensors_beside_the_policy_may_be_there(model: Path, processes: Processes, tmp_path: Path) -> None:
    _set(num_nextn_predict_layers=1)(model)
    _add("model.layers.4.enorm.weight")(model)  # of a layer for multi-token prediction
    _add("model.layers.0.self_attn.rotary_emb.inv_freq")(model)
    convert_to_megatron(model, tmp_path / "megatron", processes)


def test_a_target_that_is_there_is_refused(model: Path, processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "file").touch()
    with pytest.raises(CheckpointError, match="is there already"):
        convert_to_megatron(model, tmp_path / "megatron", processes)


def test_two_conversions_do_not_make_one_folder(model: Path, processes: Processes, tmp_path: Path) -> None:
    """The lock is another process's."""
    code = "import sys, time; from pathlib import Path; from megatron_a3po.conversion.unfinished import claim_target"
    code += "; claim_target(Path(sys.argv[1])); print('claimed', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, str(tmp_path / "megatron")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "claimed\n"
        try:
            with pytest.raises(A3poError, match="another conversion is making it"):
                convert_to_megatron(model, tmp_path / "megatron", processes)
        finally:
            other.kill()
    convert_to_megatron(model, tmp_path / "megatron", processes)


@pytest.mark.parametrize("change", ["remove", "truncate", "notes"])
def test_what_an_interrupted_conversion_has_noted_is_not_believed_without_its_files(
    model: Path, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    finish = to_megatron.finish_checkpoint
    monkeypatch.setattr(to_megatron, "finish_checkpoint", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert_to_megatron(model, tmp_path / "megatron", processes)
    left = tmp_path / ".megatron.unfinished"
    if change == "remove":
        (left / "weights" / "__0_0.distcp").unlink()
    elif change == "truncate":
        os.truncate(left / "weights" / "__0_0.distcp", 5000)
    else:
        (left / ".conversion" / "0.json").write_text("[{")
    monkeypatch.setattr(to_megatron, "finish_checkpoint", finish)
    convert_to_megatron(model, tmp_path / "megatron", processes)
    convert_to_hf(find_source(tmp_path / "megatron", None), tmp_path / "back", processes, fp8=False)
    assert differing_tensors(model, tmp_path / "back") == []


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("vocab_size", [200, 300])
def test_weights_with_another_vocabulary_than_config_json_are_refused(
    model: Path, processes: Processes, tmp_path: Path, vocab_size: int
) -> None:
    convert_to_megatron(model, tmp_path / "megatron", processes)
    _set(vocab_size=vocab_size)(tmp_path / "megatron")
    with pytest.raises(CheckpointError, match=r"word_embeddings.*are of two models"):
        convert_to_hf(find_source(tmp_path / "megatron", None), tmp_path / "back", processes, fp8=False)
    with pytest.raises(CheckpointError, match=r"259 embeddings, and config\.json says vocab_size"):
        start_weights._refuse_other_vocabulary(tmp_path / "megatron")


def test_a_disk_that_is_full_in_the_midst_of_a_file_is_said_to_be(
    model: Path, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("unexpected pos 704 vs 598")  # as torch.save says it

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="is the disk full"):
        convert_to_megatron(model, tmp_path / "megatron", processes)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    model: Path, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished.shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(CheckpointError, match=r"needs [0-9,]+ bytes.* 100,000 bytes .*free space"):
        convert_to_megatron(model, tmp_path / "megatron", processes)
    assert not list(tmp_path.rglob("*.distcp"))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_damaged_megatron_weights_are_refused_by_the_name_of_the_file(
    damage: str, model: Path, processes: Processes, tmp_path: Path
) -> None:
    convert_to_megatron(model, tmp_path / "megatron", processes)
    file = tmp_path / "megatron" / "weights" / ("manifest.json" if damage == "manifest" else "__0_0.distcp")
    content = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        file.write_bytes(content[:-9] if damage == "cut" else flipped)
    with pytest.raises(A3poError, match=file.name.replace(".", r"\.")):
        convert_to_hf(find_source(tmp_path / "megatron", model), tmp_path / "back", processes, fp8=False)
    assert not (tmp_path / "back").exists()


def test_a_checkpoint_without_its_models_files_asks_for_them(model: Path, processes: Processes, tmp_path: Path) -> None:
    convert_to_megatron(model, tmp_path / "megatron", processes)
    weights = tmp_path / "megatron" / "weights"
    with pytest.raises(ConfigError, match="--model"):
        find_source(weights, None)
    assert find_source(weights, model) == MegatronSource(weights=weights, model=model)
    (weights / "config.resolved.yaml").write_text(f"model: {model}\n")
    assert find_source(weights, None) == MegatronSource(weights=weights, model=model)
    with pytest.raises(ConfigError, match="no Megatron weights there"):
        find_source(model, None)


def test_verification_finds_a_tensor_that_differs_in_one_bit(model: Path, processes: Processes, tmp_path: Path) -> None:
    convert_to_megatron(model, tmp_path / "megatron", processes)
    assert verify._compare_tensors(model, tmp_path / "megatron" / "weights", processes, fp8=False) == 47

    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"].view(torch.int32)[0, 0] ^= 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors, such as model\.layers\.3\.mlp\.down_proj\.weight"):
        verify._compare_tensors(model, tmp_path / "megatron" / "weights", processes, fp8=False)


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
    (folder / "config.json").write_text(json.dumps(_config(gpt_oss) | fields))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return expected


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The numbers of OCP's Microscaling Formats 1.0, section 5.3.3: sign, two bits of exponent (bias 1), one of
    mantissa; float64."""
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, (codes & 1).double()
    magnitude = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * (exponent - 1.0).double().exp2())
    return torch.where(sign == 1, -magnitude, magnitude)


def _config(folder: Path) -> dict[str, Any]:
    described: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return described


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a torch_dist checkpoint, by torch's own reader."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {key: torch.empty(entry.size) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state

"""Conversions that are interrupted go on; what is damaged, or does not fit its model, disk or memory is refused."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_a3po.errors import A3poError, CheckpointError, ConfigError
from megatron_a3po.preflight.load import load_architecture
from tests.distributed.conversion_cases import differing_tensors
from tests.unit.conversion.conftest import Converter, change_config


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors", {"format": "pt"})

    return damage


def _add(name: str) -> Callable[[Path], None]:
    return _tensors(lambda tensors: tensors.update({name: torch.zeros(3)}))


def _fields(**fields: Any) -> Callable[[Path], None]:
    return lambda model: change_config(model, **fields)


UP = "model.layers.1.mlp.up_proj.weight"
MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an unknown architecture": (_fields(architectures=["Mamba"]), "Mamba.*use one of Qwen2ForCausalLM"),
    "a variant": (_fields(attention_bias=True), "attention_bias = True"),
    "a missing tensor": (_tensors(lambda tensors: tensors.pop(UP)), f"misses {UP}"),
    "more layers than config.json describes": (_fields(num_hidden_layers=3, layer_types=None), r"model\.layers\.3"),
    "layers of two dtypes": (_tensors(lambda kept: kept.update({UP: kept[UP].bfloat16()})), f"{UP} is torch.bfloat16"),
    "a config.json that is none": (lambda model: (model / "config.json").write_text("["), "config.json"),
    "heads that do not divide": (_fields(num_key_value_heads=3), "config.json: no model"),
    "a superfluous tensor": (_add("model.layers.1.mlp.extra.weight"), r"no place.*layers\.1\.mlp\.extra\.weight"),
    "another model's config.json": (_fields(intermediate_size=80), r"down_proj\.weight is \[64, 96\].* \[64, 80\]"),
    "a file that is cut off": (lambda model: os.truncate(model / "model.safetensors", 5000), "download it again"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_source_that_is_not_whole_or_not_supported_is_refused_with_a_remedy(
    mistake: str, model: Path, converter: Converter, tmp_path: Path
) -> None:
    damage, message = MISTAKES[mistake]
    damage(model)
    with pytest.raises(A3poError, match=message):
        converter.to_megatron(model, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


def test_tensors_beside_the_policy_may_be_there(model: Path, converter: Converter, tmp_path: Path) -> None:
    change_config(model, num_nextn_predict_layers=1)
    _add("model.layers.4.enorm.weight")(model)  # of a layer for multi-token prediction
    _add("model.layers.0.self_attn.rotary_emb.inv_freq")(model)
    converter.to_megatron(model, tmp_path / "megatron")


def test_a_target_that_is_there_is_refused(model: Path, converter: Converter, tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "file").touch()
    with pytest.raises(CheckpointError, match="is there already"):
        converter.to_megatron(model, tmp_path / "megatron")


def test_two_conversions_do_not_make_one_folder(model: Path, converter: Converter, tmp_path: Path) -> None:
    """The lock is another process's."""
    code = "import sys, time; from pathlib import Path; from megatron_a3po.conversion.unfinished import claim_target"
    code += "; claim_target(Path(sys.argv[1])); print('claimed', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, str(tmp_path / "megatron")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "claimed\n"
        try:
            with pytest.raises(A3poError, match="another conversion"):
                converter.to_megatron(model, tmp_path / "megatron")
        finally:
            other.kill()
    converter.to_megatron(model, tmp_path / "megatron")


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "nothing": lambda model, left: None,
    "another source": lambda model, left: os.utime(model / "model.safetensors", (1, 1)),
    "a file removed": lambda model, left: (left / "weights" / "__0_0.distcp").unlink(),
    "a file cut off": lambda model, left: os.truncate(left / "weights" / "__0_0.distcp", 5000),
    "notes cut off": lambda model, left: (left / ".conversion" / "0.json").write_text("[{"),
}


@pytest.mark.parametrize("interrupted", ["in the midst", "before the end"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_interrupted_conversion_goes_on_where_it_was_and_believes_no_note_without_its_source_and_files(
    change: str, interrupted: str, model: Path, converter: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_a3po.conversion import to_megatron

    monkeypatch.setattr(to_megatron, "_FILE_BYTES", 64 * 1024)
    write, written = to_megatron.write_pieces, list[str]()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def write_some(file: Path, tensors: Any) -> Any:
        if may_write is not None and len(written) == may_write:
            interrupt()
        written.append(file.name)
        return write(file, tensors)

    may_write = 3 if interrupted == "in the midst" else None
    monkeypatch.setattr(to_megatron, "write_pieces", write_some)
    with monkeypatch.context() as patched:
        patched.setattr(to_megatron, "finish_checkpoint", interrupt)
        with pytest.raises(KeyboardInterrupt):
            converter.to_megatron(model, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()
    CHANGES[change](model, tmp_path / ".megatron.unfinished")
    may_write = None
    converter.to_megatron(model, tmp_path / "megatron")
    assert (len(written) > len(set(written))) == (change != "nothing")
    assert differing_tensors(model, converter.to_hf(tmp_path / "megatron", tmp_path / "back")) == []


@pytest.mark.parametrize("vocab_size", [200, 300])
def test_weights_with_another_vocabulary_than_config_json_are_refused(
    vocab_size: int, megatron: Path, converter: Converter, tmp_path: Path
) -> None:
    from megatron_a3po.actor import start_weights

    change_config(megatron, vocab_size=vocab_size)
    with pytest.raises(CheckpointError, match=r"word_embeddings.*two models"):
        converter.to_hf(megatron, tmp_path / "back")
    with pytest.raises(CheckpointError, match=f"259 embeddings.*vocab_size = {vocab_size}"):
        start_weights._refuse_other_vocabulary(megatron)


def test_a_disk_that_is_full_in_the_midst_of_a_file_is_said_to_be(
    model: Path, converter: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("unexpected pos 704 vs 598")  # as torch.save says it

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="is the disk full"):
        converter.to_megatron(model, tmp_path / "megatron")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_damaged_megatron_weights_are_refused_by_the_name_of_the_file(
    damage: str, model: Path, megatron: Path, converter: Converter, tmp_path: Path
) -> None:
    file = megatron / "weights" / ("manifest.json" if damage == "manifest" else "__0_0.distcp")
    content = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    elif damage == "cut":
        os.truncate(file, len(content) - 9)
    else:
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    with pytest.raises(A3poError, match=file.name):
        converter.to_hf(megatron, tmp_path / "back", model=model)
    assert not (tmp_path / "back").exists()


def test_a_checkpoint_without_its_models_files_asks_for_them(model: Path, megatron: Path) -> None:
    from megatron_a3po.conversion.to_hf import MegatronSource, find_source

    weights = megatron / "weights"
    with pytest.raises(ConfigError, match="--model"):
        find_source(weights, None)
    assert find_source(weights, model) == MegatronSource(weights=weights, model=model)
    (weights / "config.resolved.yaml").write_text(f"model: {model}\n")
    assert find_source(weights, None) == MegatronSource(weights=weights, model=model)
    with pytest.raises(ConfigError, match="no Megatron weights"):
        find_source(model, None)


@pytest.fixture
def _own_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The comparison of logits is a program of its own, which changes its environment and its log."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_own_program")
def test_logits_are_not_compared_where_gpu_or_host_has_no_room_for_the_model_in_float32(
    model: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_a3po.conversion import logits, verify

    four_bytes_each = (4 * load_architecture(model).num_parameters, 80 << 30)
    monkeypatch.setattr(logits, "choose_modules", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: four_bytes_each)
    assert logits.main(model, model) == 0
    assert capsys.readouterr().out.startswith("logits not compared: a model in float32 needs 0.0 GiB of GPU memory")

    nothing_free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: nothing_free)
    told = verify._compare_logits(model, model)
    assert told.startswith("logits not compared: a model in float32 needs 0.0 GiB of memory")

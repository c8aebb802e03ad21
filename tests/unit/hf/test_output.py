"""Hugging Face folders that are written: complete under their name, whatever ends the writing, and then continued."""

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_a3po.errors import A3poError, CheckpointError, ConfigError
from megatron_a3po.hf import export
from megatron_a3po.hf.export import save_hf_folder
from megatron_a3po.hf.folder import HfFolder
from megatron_a3po.hf.output import HfOutput
from megatron_a3po.hf.quantize import quantization_config
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.hf.shards import ShardFile, plan_shards
from tests.support.own_process import Killed, ending, in_fork, peak_growth
from tests.support.tiny_models import save_tiny_model

TENSORS = {f"layer.{index}": torch.arange(8.0) + index for index in range(5)}
MAX_SHARD_BYTES = 64  # two of them


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", os.fstat)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("tokens")
    save_file({"old": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "model"


def specs(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in tensors.items()]


SHARDS = plan_shards(specs(TENSORS), MAX_SHARD_BYTES)


def write(output: HfOutput, shards: Sequence[ShardFile], tensors: dict[str, Tensor] = TENSORS) -> None:
    for shard in shards:
        with output.writer(shard) as writer:
            for spec in shard.tensors:
                writer.append(spec.name, tensors[spec.name])


def convert(output: HfOutput, tensors: dict[str, Tensor] = TENSORS, origin: str | None = None) -> frozenset[str]:
    shards = plan_shards(specs(tensors), MAX_SHARD_BYTES)
    done = output.begin(shards, origin=origin)
    write(output, [shard for shard in shards if shard.file_name not in done], tensors)
    output.finish(shards)
    return done


def contents(folder: Path) -> dict[str, Tensor]:
    """By the index where there is one, else all files; an oracle beside HfFolder."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in weight_map.items()}


def is_equal(folder: Path, tensors: dict[str, Tensor]) -> bool:
    found = contents(folder)
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=30), most=st.integers(1, 40))
def test_shards_are_as_full_as_the_order_allows(sizes: list[int], most: int) -> None:
    given = [TensorSpec(name=f"t{index}", dtype=torch.int8, shape=(size,)) for index, size in enumerate(sizes)]
    shards = plan_shards(given, most)

    assert [spec for shard in shards for spec in shard.tensors] == given
    assert all(shard.nbytes <= most or len(shard.tensors) == 1 for shard in shards)
    for shard, following in pairwise(shards):
        assert shard.nbytes + following.tensors[0].nbytes > most
    files = [shard.file_name for shard in shards]
    numbered = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    assert files == (numbered if len(files) > 1 else ["model.safetensors"])


def test_no_tensor_and_one_that_comes_twice_are_refused() -> None:
    spec = TensorSpec(name="a", dtype=torch.int8, shape=(1,))
    with pytest.raises(CheckpointError, match="no tensor to write"):
        plan_shards([])
    with pytest.raises(CheckpointError, match="a comes twice"):
        plan_shards([spec, spec])


@pytest.mark.parametrize("most", [10**9, 300_000])
def test_transformers_loads_what_was_written(tmp_path: Path, most: int) -> None:
    from transformers import AutoModelForCausalLM

    save_tiny_model("qwen3", tmp_path / "source")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "source" / "model.safetensors").items()}
    output = HfOutput(target=tmp_path / "out", source=tmp_path / "source")
    shards = plan_shards(specs(tensors), most)
    output.begin(shards)
    write(output, shards, tensors)
    output.finish(shards)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == dict.fromkeys(tensors, torch.bfloat16)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    weights = ["model.safetensors"] if most == 10**9 else [shard.file_name for shard in shards]
    index = ["model.safetensors.index.json"] if len(weights) > 1 else []
    assert names(tmp_path / "out") == sorted(["config.json", "generation_config.json", *weights, *index])
    if index:
        described = json.loads((tmp_path / "out" / index[0]).read_text())
        assert described["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    assert set(HfFolder.open(tmp_path / "out").names()) == tensors.keys()


def test_everything_but_weights_and_hidden_files_is_copied(source: Path, target: Path) -> None:
    copied = [
        *("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"),
        *("additional_chat_templates/tool_use.jinja", "modeling_special.py", "vocab.txt", "README.md"),
    ]
    weights = ["model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf"]
    left = [*weights, "original/params.json", ".gitattributes", ".cache/huggingface", "a.pt", "a.pth", "a.safetensors"]
    for name in [*copied, *left]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
        (source / name).chmod(0o400)
    convert(HfOutput(target=target, source=source))

    shards = [shard.file_name for shard in SHARDS]
    assert names(target) == sorted([*copied, "config.json", "model.safetensors.index.json", *shards])
    for name in copied[1:]:
        assert (target / name).read_text() == name and os.stat(target / name).st_mode & 0o200


@pytest.mark.parametrize(
    ("config", "quantization", "expected"),
    [
        ({"dtype": "bfloat16", "x": 1}, None, {"dtype": "float32", "x": 1}),
        ({"torch_dtype": "bfloat16"}, None, {"torch_dtype": "float32"}),
        ({}, None, {"torch_dtype": "float32"}),
        ({"dtype": "float16", "quantization_config": {"quant_method": "mxfp4"}}, None, {"dtype": "float32"}),
        ({}, quantization_config(), {"torch_dtype": "float32", "quantization_config": quantization_config()}),
    ],
)
def test_the_configuration_tells_the_dtype_and_quantisation_of_the_new_weights(
    source: Path, target: Path, config: dict[str, Any], quantization: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    (source / "config.json").write_text(json.dumps(config | {"name": "Müller"}))
    tensors = TENSORS | {"norm": torch.ones(2).half(), "fp8": torch.zeros(64, 64).to(torch.float8_e4m3fn)}
    convert(HfOutput(target=target, source=source, quantization_config=quantization), tensors)

    assert json.loads((target / "config.json").read_text()) == expected | {"name": "Müller"}


@pytest.mark.parametrize(
    ("prepare", "changed", "message"),
    [
        (lambda _, target: (target.mkdir(parents=True), (target / "file").touch()), {}, "not empty; give another"),
        (lambda _, target: (target.parent.mkdir(), target.write_text("x")), {}, "no folder"),
        (lambda source, _: (source / "config.json").unlink(), {}, r"no config\.json there"),
        (lambda source, _: (source / "config.json").write_text("[]"), {}, r"its config\.json"),
        (lambda *_: None, {"target": "source", "replace": True}, "would replace"),
        (lambda *_: None, {"target": "", "replace": True}, "would replace"),
        (lambda *_: None, {"target": "/"}, "needs a name"),
    ],
)
def test_folders_that_cannot_be_used_are_refused_before_anything_is_written(
    tmp_path: Path, source: Path, target: Path, prepare: Any, changed: dict[str, Any], message: str
) -> None:
    prepare(source, target)
    before = names(tmp_path)
    settings = {"target": target, "source": source} | changed
    settings["target"] = tmp_path / settings["target"]
    with pytest.raises(ConfigError, match=message):
        HfOutput(**settings).begin(SHARDS)

    assert names(tmp_path) == before


def test_too_little_space_is_told_with_both_numbers_before_weights_are_written(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", ["free"])
    needed = 5 * 32 + 3 * 2**20 + len("tokens")  # tensors, spare space of the shards, copied files
    output = HfOutput(target=target, source=source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed - 1))
    with pytest.raises(CheckpointError, match=rf"{needed:,} bytes .*{needed - 1:,} bytes .*make room"):
        output.begin(SHARDS)
    assert names(target.parent) == []

    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed))
    assert output.begin(SHARDS, origin="a") == frozenset()
    write(output, SHARDS[:1])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed - 64 - 2**20))
    assert output.begin(SHARDS, origin="a") == {SHARDS[0].file_name}


def test_a_second_start_keeps_what_the_first_completed(source: Path, target: Path) -> None:
    output = HfOutput(target=target, source=source)
    (source / "vocab.txt").write_text("not there any more at the second start")
    assert output.begin(SHARDS, origin="step 20") == frozenset()
    write(output, SHARDS[:2])
    kept = {shard.file_name: (output.folder / shard.file_name).stat().st_ino for shard in SHARDS[:2]}
    output.writer(SHARDS[2]).append("layer.4", TENSORS["layer.4"])  # killed before its end
    (source / "tokenizer.json").write_text("newer")
    (source / "vocab.txt").unlink()

    assert convert(output, origin="step 20") == kept.keys()

    assert is_equal(target, TENSORS) and [path.name for path in target.parent.iterdir()] == ["model"]
    index = "model.safetensors.index.json"
    assert names(target) == ["config.json", *(shard.file_name for shard in SHARDS), index, "tokenizer.json"]
    assert {name: (target / name).stat().st_ino for name in kept} == kept
    assert (target / "tokenizer.json").read_text() == "newer"


@pytest.mark.parametrize(
    ("origin", "tensors", "settings"),
    [
        ("step 30", TENSORS, {}),
        (None, TENSORS, {}),
        ("step 20", TENSORS | {"more": torch.ones(1)}, {}),
        ("step 20", {name: tensor.int() for name, tensor in TENSORS.items()}, {}),
        ("step 20", TENSORS, {"quantization_config": quantization_config()}),
    ],
)
def test_shards_of_another_start_are_not_kept(
    source: Path, target: Path, origin: str | None, tensors: dict[str, Tensor], settings: dict[str, Any]
) -> None:
    output = HfOutput(target=target, source=source)
    output.begin(SHARDS, origin="step 20")
    write(output, SHARDS)

    assert convert(HfOutput(target=target, source=source, **settings), tensors, origin) == frozenset()
    assert is_equal(target, tensors)


def test_a_shard_that_was_damaged_meanwhile_is_written_again(source: Path, target: Path) -> None:
    output = HfOutput(target=target, source=source)
    output.begin(SHARDS, origin="a")
    write(output, SHARDS)
    os.truncate(output.folder / SHARDS[1].file_name, 100)

    with pytest.raises(CheckpointError, match=f"{SHARDS[1].file_name}; start again"):
        output.finish(SHARDS)
    assert not target.exists()
    assert convert(output, origin="a") == {SHARDS[0].file_name, SHARDS[2].file_name}


def test_a_disk_error_tells_where_the_rest_is(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", refuse)
    output = HfOutput(target=target, source=source)
    with pytest.raises(CheckpointError, match=rf"No space left on device.* {output.folder}; make room"):
        output.begin(SHARDS)


@pytest.mark.parametrize("origin", [None, "a"])
def test_a_start_that_ends_at_any_call_leaves_a_whole_folder_and_the_next_one_succeeds(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, origin: str | None
) -> None:
    former = {"former": torch.ones(2)}
    kept, call, complete = set(), 0, False
    while not complete:
        target = tmp_path / f"at_{call}" / "model"
        output = HfOutput(target=target, source=source, replace=True)
        convert(output, former)
        with ending(monkeypatch, call):
            try:
                convert(output, origin=origin)
                complete = True
            except Killed:
                pass

        replaced = target.with_name(".model.replaced")
        assert is_equal(target if target.exists() else replaced, TENSORS if has_new(target) else former)
        kept.add(len(convert(output, origin=origin)))
        assert is_equal(target, TENSORS) and [path.name for path in target.parent.iterdir()] == ["model"]
        call += 1
    assert call > 20 and kept == ({0} if origin is None else {0, 1, 2, 3})


def has_new(target: Path) -> bool:
    return (target / SHARDS[0].file_name).exists()


def test_save_hf_folder_cuts_a_stream_into_shards_and_replaces_the_former_folder(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, files in [(10**9, ["model.safetensors"]), (MAX_SHARD_BYTES, [shard.file_name for shard in SHARDS])]:
        monkeypatch.setattr(export, "MAX_SHARD_BYTES", most)
        save_hf_folder(iter(TENSORS.items()), source, target, rank=0)

        assert is_equal(target, TENSORS) and [path.name for path in target.parent.iterdir()] == ["model"]
        index = ["model.safetensors.index.json"] if len(files) > 1 else []
        assert names(target) == sorted(["config.json", "tokenizer.json", *files, *index])

    # A shard begins where a tensor would not be aligned.
    tensors = {"odd": torch.ones(3).bfloat16(), "bias": torch.ones(2), "next": torch.ones(4).bfloat16()}
    monkeypatch.setattr(export, "MAX_SHARD_BYTES", 10**9)
    save_hf_folder(tensors.items(), source, target, rank=0)
    assert is_equal(target, tensors) and len(list(target.glob("*.safetensors"))) == 2


def test_other_ranks_go_through_the_stream_and_write_nothing(tmp_path: Path, source: Path) -> None:
    stream, before = iter(TENSORS.items()), names(tmp_path)
    save_hf_folder(stream, source, tmp_path / "out", rank=1)

    assert next(stream, None) is None and names(tmp_path) == before


def broken_stream() -> Iterator[tuple[str, Tensor]]:
    yield from TENSORS.items()
    raise CheckpointError("gather failed")


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (broken_stream, "gather failed"),
        (lambda: [*TENSORS.items(), *TENSORS.items()], r"layer\.0 comes twice"),
        (list, "no tensor to write"),
    ],
)
def test_a_stream_that_fails_leaves_the_former_folder(
    source: Path, target: Path, stream: Callable[[], Any], message: str
) -> None:
    save_hf_folder(TENSORS.items(), source, target, rank=0)
    with pytest.raises(A3poError, match=message):
        save_hf_folder(stream(), source, target, rank=0)

    assert is_equal(target, TENSORS)


@pytest.mark.parametrize("rank", [0, 1])
def test_save_hf_folder_holds_one_tensor_at_a_time(source: Path, target: Path, rank: int) -> None:
    assert in_fork(growth_of_saving, source, target, rank) < (36 << 20) + (8 << 20)


def growth_of_saving(source: Path, target: Path, rank: int) -> int:
    """Three tensors of 36 MiB."""
    tensors = ((f"{index}", torch.full((9 << 20,), 1.0)) for index in range(3))
    return peak_growth(lambda: save_hf_folder(tensors, source, target, rank=rank))

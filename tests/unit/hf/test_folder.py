"""Reading a Hugging Face folder: the same tensors as the safetensors library's, and every mistake in one message."""

import json
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from megatron_a3po.errors import CheckpointError
from megatron_a3po.hf.folder import HfFolder, UnusableFolder
from megatron_a3po.hf.quantize import quantization_config, quantize_blockwise
from megatron_a3po.hf.safetensors_format import DTYPES, DamagedFile, read_header
from tests.support.own_process import in_fork, peak_growth
from tests.support.tiny_models import save_tiny_model

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
SCALES = f"{Q_PROJ}_scale_inv"
FP8 = {"quantization_config": quantization_config()}


def write_folder(folder: Path, files: dict[str, dict[str, Tensor]], config: dict[str, Any] | None = None) -> Path:
    """`files`: file name to tensors; with an index when there are several."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]} | (config or {})))
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if len(files) > 1:
        write_index(folder, {tensor: name for name, tensors in files.items() for tensor in tensors})
    return folder


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def two_shards(folder: Path) -> Path:
    first = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3).bfloat16()}
    return write_folder(folder, {FIRST: first, SECOND: {"c": torch.arange(4.0).half(), "d": torch.tensor(2.5)}})


def problems_of(folder: Path) -> list[str]:
    with pytest.raises(UnusableFolder, match=re.escape(f"{folder}: ")) as caught:
        HfFolder.open(folder)
    assert str(caught.value).count("\n  - ") == len(caught.value.problems)
    return caught.value.problems


def the_problem(folder: Path) -> str:
    (problem,) = problems_of(folder)
    return problem


def test_every_tensor_of_a_model_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    save_tiny_model("deepseek_v3", tmp_path)
    reference = load_file(tmp_path / "model.safetensors")

    folder = HfFolder.open(tmp_path)

    assert sorted(folder.names()) == sorted(reference)
    for name, tensor in reference.items():
        read = folder.read(name)
        assert torch.equal(read, tensor) and read.is_contiguous() and name in folder
        assert (folder.shape(name), folder.dtype(name)) == (tensor.shape, tensor.dtype) == (read.shape, read.dtype)
        assert folder.nbytes(name) == tensor.nbytes
        read.zero_()  # the reader's own memory
        assert torch.equal(folder.read(name), tensor)
    assert folder.config["architectures"] == ["DeepseekV3ForCausalLM"] and not folder.is_quantized


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["F64", "F32", "F16", "BF16"]), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 9))
def test_any_bytes_of_any_shape_come_back(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, shape: list[int], seed: int
) -> None:
    itemsize = DTYPES[dtype].itemsize
    generator = torch.Generator().manual_seed(seed)
    bytes_ = torch.randint(256, (math.prod(shape) * itemsize,), generator=generator, dtype=torch.uint8)
    tensor = bytes_.view(DTYPES[dtype]).view(shape)
    folder = write_folder(tmp_path_factory.mktemp("any"), {"model.safetensors": {"a": torch.zeros(3), "x": tensor}})

    read = HfFolder.open(folder).read("x")

    assert (read.shape, read.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(read.view(-1).view(torch.uint8), bytes_)


def test_names_come_in_the_order_of_files_and_bytes(tmp_path: Path) -> None:
    folder = HfFolder.open(two_shards(tmp_path))

    files = sorted(tmp_path.glob("*.safetensors"))
    in_order = [header.name for file in files for header in sorted(read_header(file), key=lambda header: header.start)]
    assert list(folder.names()) == in_order and len(in_order) == 4
    assert folder.file_name("c") == SECOND


def test_reading_needs_no_more_memory_than_the_tensor(tmp_path: Path) -> None:
    """By the process's resident memory: the pages of a mapped file would count."""
    large = 36 << 20  # glibc gives at most 32 MiB from memory that it may keep
    folder = write_folder(tmp_path, {"model.safetensors": {name: torch.ones(large // 4) for name in "abc"}})
    assert in_fork(growth_of_reading, folder) < large + (8 << 20)


def growth_of_reading(path: Path) -> int:
    folder = HfFolder.open(path)
    return peak_growth(lambda: [folder.read(name) is None for name in folder.names()])


def test_files_that_the_index_does_not_name_are_left_alone_and_shards_need_no_index(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"a": torch.zeros(9)}, tmp_path / "consolidated.safetensors")  # as Mistral publishes beside the shards
    assert HfFolder.open(tmp_path).shape("a") == (2, 3)

    (tmp_path / "consolidated.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    assert set(HfFolder.open(tmp_path).names()) == set("abcd")

    (tmp_path / SECOND).unlink()  # which the name of the first one implies
    assert the_problem(tmp_path).startswith(f"{SECOND} is missing")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def break_header(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:12] + b"\xff" + content[13:])


def make_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")


def link_to_nothing(path: Path) -> None:
    """As in a cache of downloads from which files were removed."""
    path.unlink()
    path.symlink_to(path.parent / "blobs" / "1a2b")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (Path.unlink, r"is missing, .*index\.json has 2 tensors; copy or download it"),
        (link_to_nothing, "is missing"),
        (cut, r"has [\d,]+ bytes, .* [\d,]+; copy or download it again"),
        (extend, r"has [\d,]+ bytes, and its header describes"),
        (break_header, "damaged header .*; copy or download it again"),
        (lambda path: os.truncate(path, 0), r"is cut off, .* \(0 bytes\)"),
        (lambda path: os.truncate(path, 20), "is cut off"),
        (lambda path: path.write_bytes(b"\xff" * 4096), "no safetensors file"),
        (make_pointer, "run `git lfs pull`"),
    ],
)
def test_a_damaged_shard_is_named_once_with_its_remedy(
    tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(two_shards(tmp_path) / SECOND)

    problem = the_problem(tmp_path)
    assert problem.startswith(f"{SECOND} ") and re.search(says, problem), problem


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"a": ("F32", [2], 0, 8), "b": ("F32", [1], 4, 8)}, "b overlaps"),
        ({"a": ("F32", [1], 0, 4), "b": ("F32", [1], 8, 12)}, "belong to none"),
        ({"a": ("F32", [1], 4, 8)}, "belong to none"),
        ({"a": ("F32", [3], 0, 8)}, r"a: 8 bytes for shape \[3\] of F32"),
        ({"a": ("F32", [-1, -1], 0, 4)}, "damaged header"),
        ({"a": ("F32", [True], 0, 4)}, "damaged header"),
        ({"a": ("U8", [1], 1, 0)}, "damaged header"),
    ],
)
def test_headers_whose_places_make_no_sense_are_damaged(
    tmp_path: Path, entries: dict[str, tuple[str, list[int], int, int]], says: str
) -> None:
    described = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}
        for name, (dtype, shape, first, end) in entries.items()
    }
    header = json.dumps(described).encode()
    data = bytes(max(end for *_, end in entries.values()))
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)

    with pytest.raises(DamagedFile, match=says):
        read_header(tmp_path / "a.safetensors")


def test_all_problems_come_in_one_message(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    cut(folder / FIRST)
    (folder / SECOND).unlink()
    (folder / "config.json").write_text("{")

    described, *shards = problems_of(folder)
    assert re.search("config.json cannot be read.*copy or download it again", described)
    assert [shard.split()[0] for shard in shards] == [FIRST, SECOND]


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    assert "no such folder" in the_problem(tmp_path / "nowhere")
    assert "no such folder" in the_problem(write_folder(tmp_path, {}) / "config.json")
    assert the_problem(tmp_path) == "no *.safetensors there; copy or download the weights"
    (tmp_path / "config.json").unlink()
    expected = ["no config.json there", "no *.safetensors there"]
    assert [problem.split(";")[0] for problem in problems_of(tmp_path)] == expected


def test_pickles_are_not_read_and_the_way_to_convert_them_is_told(tmp_path: Path) -> None:
    (write_folder(tmp_path, {}) / "pytorch_model.bin").write_bytes(b"pickle")

    assert re.search("pytorch_model.bin.*convert them to safetensors", the_problem(tmp_path))


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("{", "index.json cannot be read"),
        ("[]", "index.json cannot be read"),
        ('{"weight_map": {}}', "index.json cannot be read (weight_map"),
        ('{"weight_map": {"a": 1}}', "index.json cannot be read (weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "outside the folder: ../x.safetensors"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, index: str, problem: str) -> None:
    (two_shards(tmp_path) / "model.safetensors.index.json").write_text(index)

    assert problem in the_problem(tmp_path)


def test_an_index_that_disagrees_with_the_files_is_told_in_which_tensors(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    write_index(folder, {"a": SECOND, "c": SECOND, "e": FIRST, "f": FIRST})

    problems = problems_of(folder)
    assert [problem.split(";")[0] for problem in problems] == [
        f"{FIRST} does not hold e, f, which model.safetensors.index.json has there",
        f"{FIRST} holds a, which model.safetensors.index.json has in {SECOND}",
        f"{FIRST} holds b, which model.safetensors.index.json does not name",
        f"{SECOND} holds d, which model.safetensors.index.json does not name",
    ]


def test_a_tensor_in_two_files_is_told(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    save_file({"c": torch.ones(1), "a": torch.ones(1)}, folder / SECOND)
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND})

    assert the_problem(folder).startswith(f"{FIRST} and {SECOND} both hold a;")


def test_one_file_beside_shards_that_are_another_model_is_refused(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    save_file({"z": torch.ones(1)}, folder / "model.safetensors")
    assert "model.safetensors is not in model.safetensors.index.json; remove" in the_problem(folder)

    (folder / "model.safetensors.index.json").unlink()
    assert f"model.safetensors and {FIRST}" in the_problem(folder)


def test_long_lists_of_names_are_cut(tmp_path: Path) -> None:
    tensors = {f"layer.{index:04}.qweight": torch.zeros(1, dtype=torch.int32) for index in range(1003)}
    problem = the_problem(write_folder(tmp_path, {"model.safetensors": tensors}))

    assert "and 1,000 more: I32 is no dtype of weights here" in problem and len(problem) < 300


def fp8_tensors(rows: int = 200, cols: int = 130) -> dict[str, Tensor]:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    values, scales = quantize_blockwise(weight)
    return {Q_PROJ: values, SCALES: scales, "model.norm.weight": torch.ones(4).bfloat16()}


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])  # DeepSeek-V3's and Qwen3's
@pytest.mark.parametrize("is_one_file", [True, False])
def test_fp8_weights_appear_as_what_they_stand_for(tmp_path: Path, scale_dtype: torch.dtype, is_one_file: bool) -> None:
    tensors = fp8_tensors()
    scales = tensors.pop(SCALES).to(scale_dtype)
    apart = {FIRST: tensors, SECOND: {SCALES: scales}}
    files = {"model.safetensors": tensors | {SCALES: scales}} if is_one_file else apart
    folder = HfFolder.open(write_folder(tmp_path, files, FP8))
    assert sorted(folder.names()) == [Q_PROJ, "model.norm.weight"] and folder.is_quantized
    assert SCALES not in folder
    assert (folder.shape(Q_PROJ), folder.dtype(Q_PROJ), folder.nbytes(Q_PROJ)) == ((200, 130), torch.bfloat16, 52000)
    read = folder.read(Q_PROJ)
    assert read.dtype == torch.bfloat16
    for row, col in [(0, 0), (127, 127), (128, 0), (199, 129), (0, 128)]:
        exact = float(tensors[Q_PROJ][row, col]) * float(scales[row // 128, col // 128])
        assert read[row, col] == torch.tensor(exact).bfloat16()


NOT_BLOCKS = "scales that are not of 128 x 128 blocks"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({SCALES: None}, f"FP8 without scale_inv: {Q_PROJ}"),
        ({SCALES: torch.ones(2, 1)}, f"{NOT_BLOCKS} in F32, BF16, F16: {Q_PROJ} [200, 130] with scales [2, 1] F32"),
        ({SCALES: torch.ones(2, 2, dtype=torch.float64)}, f"{NOT_BLOCKS} in F32, BF16, F16"),
        ({SCALES: torch.ones(())}, f"{NOT_BLOCKS} in F32, BF16, F16"),
        ({Q_PROJ: torch.ones(200, 130)}, "config.json says quant_method fp8, but no tensor is F8_E4M3"),
        ({Q_PROJ: torch.zeros(200, 130, dtype=torch.float8_e5m2)}, f"{Q_PROJ}: F8_E5M2 is no dtype of weights here"),
        ({"other_scale_inv": torch.ones(1)}, "scales of no FP8 weight: other_scale_inv"),
        ({"x": torch.zeros(1, 2, 2).to(torch.float8_e4m3fn), "x_scale_inv": torch.ones(1, 1)}, "x [1, 2, 2] with"),
    ],
)
def test_fp8_that_does_not_fit_its_scales_is_refused(
    tmp_path: Path, changed: dict[str, Tensor | None], problem: str
) -> None:
    tensors = {name: tensor for name, tensor in (fp8_tensors() | changed).items() if tensor is not None}

    assert any(problem in found for found in problems_of(write_folder(tmp_path, {"model.safetensors": tensors}, FP8)))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"weight_block_size": [1, 128]}, "weight_block_size = [1, 128] cannot be read, only [128, 128]"),
        ({"weight_block_size": None}, "FP8 with weight_block_size = None"),
        ({"activation_scheme": "static"}, "FP8 with activation_scheme = 'static'"),
        ({"fmt": "e5m2"}, "FP8 with fmt = 'e5m2'"),
        ({"quant_method": "gptq"}, "weights quantised by 'gptq' cannot be read; give the model's original weights"),
        ({"quant_method": "compressed-tensors"}, "weights quantised by 'compressed-tensors'"),
        (None, f"no FP8, but {Q_PROJ} are F8_E4M3; copy config.json again"),
    ],
)
def test_quantisation_that_config_json_has_otherwise_is_refused(
    tmp_path: Path, settings: dict[str, Any] | None, problem: str
) -> None:
    """By one problem, also where no tensor could be read."""
    tensors = fp8_tensors() if "quant_method" not in (settings or {}) else {"a.qweight": torch.zeros(2).int()}
    config = {} if settings is None else {"quantization_config": quantization_config() | settings}

    assert problem in the_problem(write_folder(tmp_path, {"model.safetensors": tensors}, config))


def test_packed_experts_of_gpt_oss_appear_as_they_are(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts.down_proj"
    packed = {f"{experts}_{kind}": torch.arange(4, dtype=torch.uint8) for kind in ("blocks", "scales")}
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    folder = HfFolder.open(write_folder(tmp_path, {"model.safetensors": packed}, config))

    assert set(folder.names()) == packed.keys()
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in packed.items())


def test_a_file_that_became_shorter_after_opening_is_noticed(tmp_path: Path) -> None:
    folder = HfFolder.open(two_shards(tmp_path))
    path = tmp_path / folder.file_name("d")
    last = max(read_header(path), key=lambda header: header.start).name
    cut(path)
    with pytest.raises(CheckpointError, match=f"ends inside {last}"):
        folder.read(last)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        folder.read("c")


@settings(max_examples=100, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 239), st.integers(0, 255)), min_size=1, max_size=3), cut=st.booleans())
def test_a_header_is_read_if_and_only_if_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: bool
) -> None:
    content = bytearray(save({"a": torch.ones(2, 3), "b": torch.zeros(0), "c": torch.ones(4).bfloat16()}))
    for place, value in changes:
        content[place % len(content)] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(content[: -1 if cut else None])
    expected = None
    # safetensors documents none of what it raises for a damaged file.
    with suppress(Exception), safe_open(path, "pt") as file:
        expected = set(file.keys())

    try:
        tensors = read_header(path)
    except DamagedFile:
        assert expected is None
    else:  # dtypes that the library does not know are for the folder to refuse: it tells the tensors
        is_known = all(tensor.dtype in DTYPES for tensor in tensors)
        assert not is_known or {tensor.name for tensor in tensors} == expected

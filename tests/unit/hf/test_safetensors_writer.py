"""Files written tensor by tensor: the safetensors library reads the same bits, and no file is half there."""

import os
import random
import resource
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from megatron_a3po.errors import CheckpointError
from megatron_a3po.hf.safetensors_format import DTYPES, TensorSpec, read_header
from megatron_a3po.hf.safetensors_writer import GrowingSafetensorsWriter, SafetensorsWriter
from tests.support.own_process import in_fork, peak_growth

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")


@pytest.fixture(autouse=True, scope="module")
def _fast_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))


def write(path: Path, specs: Iterable[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
    with SafetensorsWriter(path, list(specs)) as writer:
        for name, tensor in tensors:
            writer.append(name, tensor)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_holds(path: Path, tensors: dict[str, Tensor]) -> None:
    """By the library, bit for bit; and every tensor lies at a multiple of its item size."""
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(read[name]), bits(tensor))
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    assert content[8:9] == b"{" and (8 + header_bytes) % 8 == 0
    assert len(content) == 8 + header_bytes + sum(tensor.nbytes for tensor in tensors.values())
    assert all(tensor.start % DTYPES[tensor.dtype].itemsize == 0 for tensor in read_header(path))


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, (nbytes,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


SHAPES = st.lists(st.integers(0, 4), max_size=3)
RANDOM = st.builds(random_tensor, st.sampled_from(list(DTYPES.values())), SHAPES, st.integers(0, 9))
TENSORS = st.dictionaries(NAMES, RANDOM, max_size=8)


@settings(max_examples=40, deadline=None)
@given(tensors=TENSORS, seed=st.integers(0, 99))
def test_what_was_written_in_any_order_is_read_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor], seed: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    order = random.Random(seed).sample(sorted(tensors), len(tensors))
    write(path, (spec_of(name, tensor) for name, tensor in tensors.items()), ((name, tensors[name]) for name in order))

    assert_holds(path, tensors)


@settings(max_examples=40, deadline=None)
@given(tensors=TENSORS)
def test_a_file_that_grows_is_read_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor]
) -> None:
    path = tmp_path_factory.getbasetemp() / "growing.safetensors"
    writer = GrowingSafetensorsWriter(path)
    written = {}
    for name, tensor in tensors.items():
        if writer.has_room(spec_of(name, tensor)):
            writer.append(name, tensor)
            written[name] = tensor
    assert writer.nbytes == sum(tensor.nbytes for tensor in written.values())
    specs = writer.complete()

    assert [spec.name for spec in specs] == list(written)
    assert_holds(path, written)


def test_a_tensor_has_no_room_where_it_would_not_be_aligned_and_some_thousand_find_room(tmp_path: Path) -> None:
    writer = GrowingSafetensorsWriter(tmp_path / "a.safetensors")
    for index in range(1500):
        writer.append(f"model.layers.61.mlp.experts.{index:04}.down_proj.weight_scale_inv", torch.ones(1, 1))
    assert writer.has_room(spec_of("model.layers.61.mlp.experts.255.down_proj.weight_scale_inv", torch.ones(1, 1)))

    writer.append("odd", torch.ones(3).bfloat16())
    assert writer.has_room(spec_of("half", torch.ones(1).half())) and not writer.has_room(spec_of("x", torch.ones(1)))


def test_a_header_that_is_full_is_noticed_before_it_overflows(tmp_path: Path) -> None:
    writer = GrowingSafetensorsWriter(tmp_path / "a.safetensors")
    tensors: dict[str, Tensor] = {}
    name = "\x01" * 1000  # JSON needs six bytes for each
    while writer.has_room(spec_of(name, torch.ones(2))):
        tensors[name] = torch.full((2,), float(len(tensors)))
        writer.append(name, tensors[name])
        name = f"{len(tensors):04}" + "\x01" * 996
    writer.complete()

    assert len(tensors) > 150
    assert_holds(tmp_path / "a.safetensors", tensors)


def test_tensors_that_lie_otherwise_in_memory_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    tensors = {
        "transposed": base.T,
        "expanded": base[:, :1].expand(3, 5),
        "part": base[1:, 2:],
        "parameter": torch.nn.Parameter(base.clone()),
        "scalar": torch.tensor(7.0),
    }
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    write(tmp_path / "a.safetensors", specs, tensors.items())

    assert_holds(tmp_path / "a.safetensors", {name: tensor.detach().clone() for name, tensor in tensors.items()})


ONE = torch.ones(2, 3)
SPECS = [spec_of("a", ONE), spec_of("b", ONE)]


@pytest.mark.parametrize(
    ("appended", "message"),
    [
        ([("a", ONE)], "1 tensors did not come, such as b"),
        ([], "2 tensors did not come, such as a, b"),
        ([("a", ONE), ("a", ONE)], "a comes twice"),
        ([("a", ONE), ("c", ONE)], "c does not belong"),
        ([("a", ONE.T)], r"a is \[3, 2\] torch.float32, .* \[2, 3\] torch.float32"),
        ([("a", ONE.half())], r"a is \[2, 3\] torch.float16, .* \[2, 3\] torch.float32"),
    ],
)
def test_tensors_that_are_not_the_announced_ones_are_refused_and_nothing_stays(
    tmp_path: Path, appended: list[tuple[str, Tensor]], message: str
) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match=message) as caught:
        write(path, SPECS, appended)

    assert str(path) in str(caught.value) and list(tmp_path.iterdir()) == []


def test_names_that_are_announced_twice_and_strange_dtypes_are_refused_before_there_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    growing = GrowingSafetensorsWriter(path)
    growing.append("a", ONE)
    strange = torch.ones(1, dtype=torch.complex64)
    for tensor, message in (("a", ONE), "a comes twice"), (("z", strange), r"z is torch\.complex64"):
        with pytest.raises(CheckpointError, match=message):
            SafetensorsWriter(tmp_path / "b.safetensors", [*SPECS, spec_of(*tensor)])
        with pytest.raises(CheckpointError, match=message):
            growing.append(*tensor)
    assert not (tmp_path / "b.safetensors").exists()


def test_a_process_that_ends_before_the_file_is_whole_leaves_the_former_one(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"former")
    writer = SafetensorsWriter(path, SPECS)
    writer.append("a", ONE)  # and here the process is killed: nothing of it runs any more

    assert path.read_bytes() == b"former"
    assert sorted(file.name for file in tmp_path.iterdir()) == [".a.safetensors.unfinished", "a.safetensors"]

    write(path, SPECS, [("b", ONE), ("a", ONE)])
    assert_holds(path, {"a": ONE, "b": ONE})
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_an_error_of_the_caller_is_passed_on_and_removes_the_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "a.safetensors", SPECS, (("a", ONE / (1 // number)) for number in (1, 0)))

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"could not be written.*make room or give another folder"):
        SafetensorsWriter(tmp_path / "nowhere" / "a.safetensors", SPECS)

    large, limits = torch.ones(1 << 19), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"could not be written.*make room"):
            write(tmp_path / "large.safetensors", [spec_of("a", large)], [("a", large)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_the_bytes_reach_the_disk_before_the_name_and_then_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, steps = tmp_path / "a.safetensors", []

    def fsync(descriptor: int) -> None:
        what = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else f"file of {os.fstat(descriptor).st_size}"
        steps.append((what, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write(path, SPECS, [("a", ONE), ("b", ONE)])

    assert steps == [(f"file of {path.stat().st_size}", False), ("folder", True)]


def test_writing_needs_no_memory_besides_the_tensor(tmp_path: Path) -> None:
    assert in_fork(growth_of_writing, tmp_path) < 4 << 20


def growth_of_writing(folder: Path) -> int:
    """A tensor of 36 MiB, three times."""
    tensor = torch.ones(9 << 20)
    specs = [spec_of(str(index), tensor) for index in range(2)]
    growing = GrowingSafetensorsWriter(folder / "b.safetensors")

    def write_all() -> None:
        with SafetensorsWriter(folder / "a.safetensors", specs) as writer:
            for spec in specs:
                writer.append(spec.name, tensor)
        growing.append("0", tensor)
        growing.complete()

    return peak_growth(write_all)

"""A rank's part of a save, written without the other ranks, and what Transformer Engine asks for before a load."""

import functools
import io
import os
import queue
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_a3po import cpu


@pytest.fixture
def make_save(tmp_path: Path) -> Any:
    """A save of one file with these tensors, as Megatron's plan describes it."""
    cpu.install()
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    from megatron_a3po.actor.megatron_state import TrainingStateSave

    def make_save(tensors: dict[str, torch.Tensor], folder: Path = tmp_path) -> tuple[TrainingStateSave, Any]:
        items = [
            WriteItem(
                index=MetadataIndex(name),
                type=WriteItemType.TENSOR,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size([0]), sizes=tensor.shape),
                    properties=TensorProperties(dtype=tensor.dtype),
                    size=tensor.shape,
                ),
            )
            for name, tensor in tensors.items()
        ]
        results: queue.Queue[Any] = queue.Queue()
        bucket = (folder / "__0_0.distcp", "__0_0.distcp", ([], list(zip(items, tensors.values(), strict=True))))
        request = AsyncRequest(
            functools.partial(print, [FileSystemWriterAsync(folder).transforms]), (0, [bucket], results), []
        )
        return TrainingStateSave(request), results

    return make_save


def written(file: Path, results: Any) -> list[torch.Tensor]:
    (parts,) = results.get_nowait().values()
    content = file.read_bytes()
    infos = [part.storage_data for part in parts]
    return [torch.load(io.BytesIO(content[info.offset : info.offset + info.length])) for info in infos]


def test_what_is_written_is_the_state_at_the_copy_also_of_tensors_in_host_memory(
    make_save: Any, tmp_path: Path
) -> None:
    live = {"weights": torch.arange(6.0), "view": torch.arange(10.0)[2:5], "bf16": torch.ones(4, dtype=torch.bfloat16)}
    before = [tensor.clone() for tensor in live.values()]
    save, results = make_save(live)
    save.copy_to_host()
    for tensor in live.values():
        tensor.fill_(-1.0)  # training goes on
    save.write()

    assert save.file_names == ["__0_0.distcp"]
    found = written(tmp_path / "__0_0.distcp", results)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, before, strict=True)) and len(found) == 3


class OnAnotherDevice(torch.Tensor):
    """Values that can be copied to the host, and nothing else."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "OnAnotherDevice":
        tensor = torch.Tensor._make_wrapper_subclass(cls, host.shape, dtype=host.dtype, device="meta")
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        assert function is torch.ops.aten._to_copy.default and kwargs["device"] == torch.device("cpu"), function
        COPIED.append(args[0].host)
        return args[0].host.clone()


COPIED: list[torch.Tensor] = []


def test_tensors_of_another_device_are_written_without_a_copy_of_all_of_them_before(
    make_save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    values = [torch.arange(6.0), torch.ones(4, dtype=torch.bfloat16), torch.arange(3)]
    save, results = make_save({"0": OnAnotherDevice(values[0]), "1": OnAnotherDevice(values[1]), "here": values[2]})
    COPIED.clear()
    copied_before_writing = []
    write_item = filesystem_async._write_item

    # With the parameters that Megatron looks for in its signature.
    def counting(*args: Any, serialization_format: Any = None) -> Any:
        copied_before_writing.append(len(COPIED))
        return write_item(*args, serialization_format=serialization_format)

    monkeypatch.setattr(filesystem_async, "_write_item", counting)
    save.write()

    found = written(tmp_path / "__0_0.distcp", results)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, values, strict=True)) and len(found) == 3
    assert copied_before_writing == [1, 2, 2]


@pytest.mark.parametrize("has_text", [True, False])
def test_a_file_that_cannot_be_written_is_an_oserror_with_the_reason_or_its_class(
    make_save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_text: bool
) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    def fail(*_: Any, serialization_format: Any = None) -> None:
        raise AssertionError

    if not has_text:
        monkeypatch.setattr(filesystem_async, "_write_item", fail)
    save, results = make_save({"weights": torch.ones(3)}, tmp_path / "nowhere" if has_text else tmp_path)

    with pytest.raises(OSError, match="No such file or directory" if has_text else "AssertionError"):
        save.write()
    assert results.empty(), "the other ranks must not be told that this one has written"


def test_a_rank_for_which_others_write_has_no_files() -> None:
    cpu.install()
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    from megatron_a3po.actor.megatron_state import TrainingStateSave

    finished: list[str] = []
    save = TrainingStateSave(AsyncRequest(None, (), [lambda: finished.append("collective")]))
    save.copy_to_host()
    save.write()
    save.finish()
    assert save.file_names == [] and finished == ["collective"]


PICKLES = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_pickled_scales_are_allowed_while_a_checkpoint_is_loaded_and_not_afterwards(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu.install()
    from megatron_a3po.actor.megatron_state import _pickled_extra_state

    monkeypatch.delenv(PICKLES, raising=False)
    if before is not None:
        monkeypatch.setenv(PICKLES, before)
    seen = []

    def load() -> None:
        with _pickled_extra_state():
            seen.append(os.getenv(PICKLES, "0"))
            raise RuntimeError("damaged")

    with pytest.raises(RuntimeError, match="damaged"):
        load()
    assert seen == ["1"]
    assert os.environ.get(PICKLES) == before

"""Write safetensors files one tensor at a time; the safetensors library writes dictionaries of tensors only.

A file is written under `.NAME.unfinished` and gets its name when it is whole and on the disk.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from megatron_a3po.errors import CheckpointError
from megatron_a3po.hf.safetensors_format import ALIGNMENT, DTYPE_NAMES, TensorSpec, make_header
from megatron_a3po.runtime.files import give_name, unfinished_path, writing

_REMEDY = "make room or give another folder, and start again"
_RESERVED_HEADER_BYTES = 1 << 20
"""Room for about 7,000 tensors in a file whose tensors are not known beforehand"""
_LONGEST_ENTRY_BYTES = 256
"""The most that a tensor takes in the header, besides its name"""


class SafetensorsWriter:
    """Writes a file whose tensors are known beforehand, in any order. A context manager.

    At the end of the `with` block the file gets its name. An error inside, and a missing tensor, remove the file.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorSpec]) -> None:
        """Raise CheckpointError for names that come twice, for unknown dtypes, and if the file cannot be made."""
        for spec in tensors:
            _refuse_dtype(path, spec.name, spec.dtype)
        # Larger items first: each tensor then starts at a multiple of its item size, as readers that map files need.
        ordered = sorted(tensors, key=lambda spec: -spec.dtype.itemsize)
        self._header = make_header(ordered)
        self._missing: dict[str, tuple[TensorSpec, int]] = {}
        offset = len(self._header)
        for spec in ordered:
            _refuse_twice(path, spec.name, spec.name in self._missing)
            self._missing[spec.name] = spec, offset
            offset += spec.nbytes
        self._written: set[str] = set()
        self._file = _UnfinishedFile(path)

    def __enter__(self) -> Self:
        return self

    def append(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, from any device, to its place.

        Raises CheckpointError for a tensor that is not announced, was written already, has another shape or dtype, or
        cannot be written.
        """
        path = self._file.path
        _refuse_twice(path, name, name in self._written)
        if name not in self._missing:
            raise CheckpointError(f"{path}: {name} does not belong into this file")
        spec, offset = self._missing[name]
        if (spec.dtype, spec.shape) != (tensor.dtype, tuple(tensor.shape)):
            raise CheckpointError(
                f"{path}: {name} is {list(tensor.shape)} {tensor.dtype}, and was to be {list(spec.shape)} {spec.dtype}"
            )
        self._file.write(offset, tensor)
        del self._missing[name]
        self._written.add(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._file as file:
            if error is None:
                if self._missing:
                    missing = list(self._missing)
                    raise CheckpointError(
                        f"{file.path}: {len(missing):,} tensors did not come, such as {', '.join(missing[:3])}"
                    )
                file.complete(self._header)


class GrowingSafetensorsWriter:
    """Writes a file whose tensors are not known beforehand, in the order in which they come.

    `complete` gives it its name. Without it, the unfinished file stays until its folder is removed.
    """

    def __init__(self, path: Path) -> None:
        """Raise CheckpointError if the file cannot be made."""
        self.path = path
        self._file = _UnfinishedFile(path)
        self._tensors: dict[str, TensorSpec] = {}
        self._header_bytes = ALIGNMENT
        self._offset = _RESERVED_HEADER_BYTES

    @property
    def nbytes(self) -> int:
        """The size of the tensors so far."""
        return self._offset - _RESERVED_HEADER_BYTES

    def has_room(self, spec: TensorSpec) -> bool:
        """Tell whether the header has room, and the tensor would start at a multiple of its item size."""
        header_bytes = self._header_bytes + _entry_bytes(spec)
        return header_bytes <= _RESERVED_HEADER_BYTES and self._offset % spec.dtype.itemsize == 0

    def append(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, from any device, after the others. It must have room. Raises CheckpointError."""
        spec = TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
        _refuse_twice(self.path, name, name in self._tensors)
        _refuse_dtype(self.path, name, tensor.dtype)
        assert self.has_room(spec), spec
        self._file.write(self._offset, tensor)
        self._tensors[name] = spec
        self._offset += spec.nbytes
        self._header_bytes += _entry_bytes(spec)

    def complete(self) -> tuple[TensorSpec, ...]:
        """Give the file its name and return its tensors. Raises CheckpointError."""
        header = make_header(self._tensors.values(), reserved_bytes=_RESERVED_HEADER_BYTES)
        assert len(header) == _RESERVED_HEADER_BYTES, len(header)
        with self._file as file:
            file.complete(header)
        return tuple(self._tensors.values())


class _UnfinishedFile:
    """A file that is removed at the end of its `with` block, unless it was completed. Methods raise CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unfinished = unfinished_path(path)
        with writing(self.path, _REMEDY):
            # Unbuffered: tensors are larger than any buffer.
            self._file = self._unfinished.open("wb", buffering=0)

    def write(self, offset: int, tensor: Tensor) -> None:
        flat = tensor.detach().cpu().contiguous().view(-1)
        self._write(offset, memoryview(flat.view(torch.uint8).numpy()))

    def complete(self, header: bytes) -> None:
        self._write(0, memoryview(header))
        with writing(self.path, _REMEDY):
            # The bytes reach the disk before the name does (runtime/files.py).
            os.fsync(self._file.fileno())
            give_name(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def _write(self, offset: int, data: memoryview) -> None:
        with writing(self.path, _REMEDY):
            self._file.seek(offset)
            done = 0
            # The kernel takes at most 2 GiB at once.
            while done < len(data):
                done += self._file.write(data[done:])


def _entry_bytes(spec: TensorSpec) -> int:
    # Six: the longest that JSON makes of one byte of a name (\u0000).
    return 6 * len(spec.name.encode()) + _LONGEST_ENTRY_BYTES


def _refuse_twice(path: Path, name: str, twice: bool) -> None:
    if twice:
        raise CheckpointError(f"{path}: {name} comes twice; every tensor belongs into a folder once")


def _refuse_dtype(path: Path, name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{path}: {name} is {dtype}, which the format does not have; convert it to a float dtype")

"""The safetensors file format: read headers, and make headers for new files.

A file is 8 bytes with the header's length (little-endian), the header (JSON, which may end in spaces), and the tensors'
bytes, in row-major order and without holes between them:

    {"__metadata__": {"format": "pt"}, "norm.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}, ...}

Offsets count from the header's end. Source: https://huggingface.co/docs/safetensors, "Format".
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

PREFIX_BYTES = 8
ALIGNMENT = 8
"""The tensors' bytes start at a multiple of it, the largest item size"""
_MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses a longer one."""
_GIT_LFS_POINTER = b"version https://git-lfs"


class DamagedFile(ValueError):
    """A file is not a whole safetensors file. The message names problem and remedy, but not the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where a tensor lies in its file."""

    name: str
    dtype: str
    """as the format writes it; may be one that is not in `DTYPES`"""
    shape: tuple[int, ...]
    start: int
    """from the beginning of the file"""
    nbytes: int


def read_header(path: Path) -> list[StoredTensor]:
    """Return the file's tensors in the order of their bytes. Reads the header only. Raises DamagedFile and OSError."""
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        start = file.read(len(_GIT_LFS_POINTER))
        if start == _GIT_LFS_POINTER:
            raise DamagedFile("is only a pointer to the file; run `git lfs pull` in its folder")
        header_bytes = int.from_bytes(start[:PREFIX_BYTES], "little")
        if len(start) < PREFIX_BYTES or PREFIX_BYTES + min(header_bytes, _MAX_HEADER_BYTES) > size_bytes:
            raise DamagedFile(f"is cut off, or no safetensors file ({size_bytes:,} bytes); copy or download it again")
        if header_bytes > _MAX_HEADER_BYTES:
            raise DamagedFile("is no safetensors file, or its header is damaged; copy or download it again")
        file.seek(PREFIX_BYTES)
        text = file.read(header_bytes)
    try:
        if not text.startswith(b"{"):
            raise ValueError("it does not start with {")
        tensors = _parse(json.loads(text, object_pairs_hook=_unique_names), PREFIX_BYTES + header_bytes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"has a damaged header ({error}); copy or download it again") from None
    described = tensors[-1].start + tensors[-1].nbytes if tensors else PREFIX_BYTES + header_bytes
    if described != size_bytes:
        raise DamagedFile(
            f"has {size_bytes:,} bytes, and its header describes {described:,}; copy or download it again"
        )
    return tensors


def make_header(tensors: Iterable[TensorSpec], *, reserved_bytes: int = 0) -> bytes:
    """Return length and header of a file that holds these tensors in this order.

    The result is at least `reserved_bytes` long and a multiple of `ALIGNMENT`, with spaces at its end.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in tensors:
        entries[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    size = max(PREFIX_BYTES + len(text), reserved_bytes)
    size += -size % ALIGNMENT
    return (size - PREFIX_BYTES).to_bytes(PREFIX_BYTES, "little") + text.ljust(size - PREFIX_BYTES)


def _parse(header: dict[str, Any], data_start: int) -> list[StoredTensor]:
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        (first, end), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), entry["dtype"]
        if any(type(number) is not int or number < 0 for number in (first, end, *shape)) or type(dtype) is not str:
            raise ValueError(f"{name}: {entry}")
        if dtype in DTYPES and end - first != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"{name}: {end - first} bytes for shape {list(shape)} of {dtype}")
        tensors.append(StoredTensor(name=name, dtype=dtype, shape=shape, start=data_start + first, nbytes=end - first))
    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    expected = data_start
    for tensor in tensors:
        if tensor.start != expected:
            raise ValueError(f"{tensor.name} overlaps with another tensor, or bytes before it belong to none")
        expected += tensor.nbytes
    return tensors


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name comes twice")
    return content

"""Read the weights of a Hugging Face folder one tensor at a time."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from megatron_a3po.config.model_folder import UnreadableModel, read_model_config
from megatron_a3po.errors import CheckpointError, ConfigError
from megatron_a3po.hf.folder_checks import FP8_DTYPE, read_files, weight_problems
from megatron_a3po.hf.quantize import SCALE_SUFFIX, dequantize_blockwise
from megatron_a3po.hf.safetensors_format import DTYPES, StoredTensor


class UnusableFolder(ConfigError):
    """The weights of a Hugging Face folder cannot be read; one message lists every problem."""

    def __init__(self, folder: Path, problems: list[str]) -> None:
        super().__init__("\n".join([f"{folder}: the weights cannot be read:", *(f"  - {text}" for text in problems)]))
        self.problems = problems


class HfFolder:
    """Names, shapes and places of the weights; `read` brings one of them into memory.

    FP8 weights with block-wise scales (DeepSeek-V3, Qwen3-FP8) appear as bfloat16 weights, dequantised; their scales do
    not appear. The packed experts of gpt-oss (MXFP4: `..._blocks`, `..._scales`) appear as they are stored, as uint8.
    Files are read, not mapped: mapped pages would count as this process's memory until the kernel reclaims them.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], tensors: Mapping[str, tuple[str, StoredTensor]]) -> None:
        """Use `open`, which checks everything first."""
        self.path = path
        self.config = MappingProxyType(config)
        """the content of config.json"""
        self._tensors = tensors
        self._fp8 = {name for name, (_, tensor) in tensors.items() if tensor.dtype == FP8_DTYPE}
        hidden = {name + SCALE_SUFFIX for name in self._fp8}
        self._visible = {name: None for name in tensors if name not in hidden}

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read config.json, the index and the headers of all weight files.

        Raises UnusableFolder with every problem: missing, damaged and contradictory files, weights in pickles,
        quantised weights that cannot be read.
        """
        if not path.is_dir():
            raise UnusableFolder(path, ["no such folder; give a Hugging Face model folder"])
        problems: list[str] = []
        config: dict[str, Any] | None = None
        try:
            config = read_model_config(path)
        except UnreadableModel as error:
            problems.append(f"{error.problem}; {error.remedy}")
        try:
            files = read_files(path)
        except OSError as error:
            raise UnusableFolder(path, [*problems, f"the folder cannot be read ({error})"]) from None
        problems += files.problems
        if config is not None:
            problems += weight_problems(config, files)
        if problems or config is None:
            raise UnusableFolder(path, problems)
        return cls(path, config, files.tensors)

    @property
    def is_quantized(self) -> bool:
        """True if any weight is stored in FP8."""
        return bool(self._fp8)

    def names(self) -> tuple[str, ...]:
        """Return the names in the order of the files and of the bytes in them, which is the fastest to read."""
        return tuple(self._visible)

    def __contains__(self, name: object) -> bool:
        return name in self._visible

    def file_name(self, name: str) -> str:
        """Return the name of the file that holds the tensor."""
        return self._tensors[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of what `read` returns."""
        return self._tensors[name][1].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of what `read` returns."""
        return torch.bfloat16 if name in self._fp8 else DTYPES[self._tensors[name][1].dtype]

    def nbytes(self, name: str) -> int:
        """Return the size of what `read` returns."""
        stored = self._tensors[name][1].nbytes
        return stored * torch.bfloat16.itemsize if name in self._fp8 else stored

    def read(self, name: str) -> Tensor:
        """Return the tensor, contiguous and on the CPU, in memory of its own.

        Takes at most one and a half times its size of memory (FP8), else its size. Raises KeyError, and CheckpointError
        if the file has changed.
        """
        if name not in self._fp8:
            return self._read_stored(name)
        return dequantize_blockwise(self._read_stored(name), self._read_stored(name + SCALE_SUFFIX), torch.bfloat16)

    def _read_stored(self, name: str) -> Tensor:
        file, stored = self._tensors[name]
        tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        buffer = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        try:
            # Unbuffered: the bytes go from the kernel into the tensor, which is larger than any buffer.
            with (self.path / file).open("rb", buffering=0) as opened:
                opened.seek(stored.start)
                done = 0
                # The kernel hands out at most 2 GiB at once.
                while done < len(buffer) and (count := opened.readinto(buffer[done:])):
                    done += count
        except OSError as error:
            raise CheckpointError(
                f"{self.path / file}: {name} cannot be read ({error}); copy the file again"
            ) from error
        if done < len(buffer):
            raise CheckpointError(
                f"{self.path / file}: ends inside {name}, and did not before; was it replaced? Start again"
            )
        return tensor

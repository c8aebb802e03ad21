"""Convert a Hugging Face folder to a folder with Megatron's weights, file by file.

The result holds `config.json`, the tokenizer and all other files beside the weights, and in `weights/` a checkpoint in
Megatron's torch_dist format with a manifest. It has no layout: every layout can load it.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megatron_a3po.config.model_folder import MEGATRON_WEIGHTS, read_model_config
from megatron_a3po.conversion.parts import describe_model, split_parts
from megatron_a3po.conversion.processes import Processes
from megatron_a3po.conversion.torch_dist import Piece, finish_checkpoint, is_whole, write_pieces
from megatron_a3po.conversion.unfinished import UnfinishedFolder
from megatron_a3po.errors import CheckpointError, ConfigError
from megatron_a3po.hf.folder import HfFolder
from megatron_a3po.hf.output import model_files
from megatron_a3po.runtime.files import write_durably
from megatron_a3po.runtime.manifest import FileRecord, describe, write_manifest
from megatron_a3po.weights.hf_mapping import HfMapping, Part

_FILE_BYTES = 1024**3
_SPARE_BYTES = 4096
"""More than the format adds to a tensor"""
_MXFP4 = ("_blocks", "_scales")
"""The two tensors that hold the experts of gpt-oss in place of one"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LazyTensors(Mapping[str, Tensor]):
    """The tensors of a folder, each read when it is needed."""

    folder: HfFolder

    def __getitem__(self, name: str) -> Tensor:
        return self.folder.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.folder.names())

    def __len__(self) -> int:
        return len(self.folder.names())

    def __contains__(self, name: object) -> bool:
        return name in self.folder


def convert_to_megatron(source: Path, target: Path, processes: Processes) -> None:
    """Write the folder `target` with Megatron's weights. Collective: each process writes its share of the files.

    Each process holds one part of the model at a time. Raises ConfigError for a model that cannot be trained or whose
    files are not whole, and CheckpointError for a target that is there already and a disk that is too small.
    """
    folder = HfFolder.open(source)
    mapping = describe_model(source)
    refuse_other_tensors(mapping, folder)
    sizes = {part: _written_bytes(part, folder) for part in mapping.parts}
    files = split_parts(mapping.parts, sizes, _FILE_BYTES)
    work = [str(source.resolve()), _identity(folder), [[part.hf_names for part in file] for file in files]]
    needed_bytes = sum(size + _SPARE_BYTES * len(part.parameters) for part, size in sizes.items())
    output = UnfinishedFolder(target, work, needed_bytes, processes)
    weights = output.path / MEGATRON_WEIGHTS
    processes.on_rank_zero(lambda: _copy_model_files(source, output.path))

    mine = [
        number for number in processes.share(range(len(files))) if not is_whole(weights, _noted_pieces(output, number))
    ]
    with processes.progress("converting", sum(sizes[part] for number in mine for part in files[number])) as advance:
        for number in mine:
            pieces = write_pieces(weights / f"__{number}_0.distcp", _pieces(mapping, files[number], folder, advance))
            output.note(str(number), [piece.model_dump() for piece in pieces])
    _finish(weights, output, len(files), processes)
    if not (source / "tokenizer.json").exists():
        processes.say(f"{source}: has no tokenizer.json; to train with {target}, copy the tokenizer's files there")


def _pieces(
    mapping: HfMapping, parts: Sequence[Part], folder: HfFolder, advance: Callable[[int], object]
) -> Iterator[ShardedTensor]:
    for part in parts:
        try:
            values = mapping.from_hf(part, LazyTensors(folder=folder))
        except (ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
            raise CheckpointError(f"{folder.path}: {', '.join(part.hf_names)} cannot be converted ({error})") from error
        for parameter in part.parameters:
            yield from mapping.sharded(parameter, values.pop(parameter.name))
        advance(_written_bytes(part, folder))


def _written_bytes(part: Part, folder: HfFolder) -> int:
    """Return the size of the part's values; MXFP4 weights are written in bfloat16."""
    items = [folder.dtype(name).itemsize if name in folder else torch.bfloat16.itemsize for name in part.hf_names]
    return part.numel * max(items)


def _noted_pieces(output: UnfinishedFolder, number: int) -> list[Piece]:
    try:
        return [Piece(**piece) for piece in output.noted(str(number)) or []]
    except (TypeError, ValueError):
        return []


def _copy_model_files(source: Path, folder: Path) -> None:
    (folder / MEGATRON_WEIGHTS).mkdir(exist_ok=True)
    for file, name in model_files(source):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / name)
    described = read_model_config(source)
    # The weights are dequantised now.
    described.pop("quantization_config", None)
    write_durably(folder / "config.json", json.dumps(described, indent=2, ensure_ascii=False) + "\n")


def _finish(weights: Path, output: UnfinishedFolder, num_files: int, processes: Processes) -> None:
    def write_metadata() -> None:
        finish_checkpoint(weights, [piece for number in range(num_files) for piece in _noted_pieces(output, number)])

    processes.on_rank_zero(write_metadata)
    described = describe(weights, processes.rank, processes.world_size)
    shares = processes.gather({name: [record.size_bytes, record.sha256] for name, record in described.items()})
    records = {name: FileRecord(*record) for share in shares for name, record in share.items()}
    processes.on_rank_zero(lambda: write_manifest(weights, 0, records, {"content": "weights"}))
    output.finish()


def stored_names(part: Part, folder: HfFolder) -> list[str]:
    """Return the tensors of the part that the folder has."""
    candidates = [[name, *(name + suffix for suffix in _MXFP4)] for name in part.hf_names]
    return [name for names in candidates for name in names if name in folder]


def refuse_other_tensors(mapping: HfMapping, folder: HfFolder) -> None:
    """Raise ConfigError for tensors that are missing, that the model has no place for, or of another shape."""
    used = {name for part in mapping.parts for name in stored_names(part, folder)}
    missing = [
        name
        for part in mapping.parts
        for name in part.hf_names
        if name not in used and not all(name + suffix in used for suffix in _MXFP4)
    ]
    unused = [name for name in folder.names() if name not in used and not _may_be_left_out(name, folder.config)]
    wrong = [
        f"{name} is {list(folder.shape(name))} instead of {list(shape)}"
        for part in mapping.parts
        for name, shape in mapping.hf_shapes(part).items()
        if name in folder and folder.shape(name) != shape
    ]
    problems = [
        ("misses", missing),
        ("has tensors of several dtypes, which Megatron stores as one:", _mixed_dtypes(mapping, folder)),
        ("has tensors that the model has no place for:", unused),
        ("has other shapes than config.json describes:", wrong),
    ]
    texts = [f"{what} {', '.join(names[:5])}{_more(names)}" for what, names in problems if names]
    if texts:
        raise ConfigError(f"{folder.path}: {'; '.join(texts)}; config.json and weights are of two models")


def _mixed_dtypes(mapping: HfMapping, folder: HfFolder) -> list[str]:
    """Describe tensors that become one tensor in Megatron and have different dtypes."""
    first: dict[str, str] = {}
    found = []
    for part in mapping.parts:
        names = [name for name in part.hf_names if name in folder]
        for key in {piece.key for parameter in part.parameters for piece in mapping.sharded(parameter)}:
            for name in names:
                other = first.setdefault(key, name)
                if folder.dtype(name) != folder.dtype(other):
                    found.append(f"{name} is {folder.dtype(name)} and {other} {folder.dtype(other)}")
    return list(dict.fromkeys(found))


def _may_be_left_out(name: str, described: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint may hold this tensor in addition to the policy."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    beyond = int(layer[1]) - described["num_hidden_layers"] if layer is not None else -1
    if beyond >= 0:
        return beyond < (described.get("num_nextn_predict_layers") or 0)
    if name == "lm_head.weight" and described.get("tie_word_embeddings", False):
        return True
    return name.endswith("rotary_emb.inv_freq")


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 5} more" if len(names) > 5 else ""


def _identity(folder: HfFolder) -> list[Any]:
    """Return what tells a source from one that has replaced it between two attempts."""
    files = sorted({folder.file_name(name) for name in folder.names()})
    stats = [(folder.path / file).stat() for file in files]
    return [
        dict(folder.config),
        [[file, stat.st_size, stat.st_mtime_ns] for file, stat in zip(files, stats, strict=True)],
    ]

"""Check the weights of a Hugging Face folder: the files against the index, the tensors against the configuration.

Reads headers only. Every problem names its remedy.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_a3po.hf.fp8_blocks import BLOCK, scale_shape
from megatron_a3po.hf.quantize import SCALE_SUFFIX
from megatron_a3po.hf.safetensors_format import DTYPES, DamagedFile, StoredTensor, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
FP8_DTYPE = "F8_E4M3"
_FLOATS = ("F64", "F32", "F16", "BF16")
_SCALES = ("F32", "BF16", "F16")
"""DeepSeek-V3 stores its scales as F32, Qwen3 as BF16."""
_MXFP4_SUFFIXES = ("_blocks", "_scales")
_SHOWN = 3
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d{1,5})\.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """The tensors of the folder's weight files, as far as they can be read."""

    tensors: Mapping[str, tuple[str, StoredTensor]]
    """name: (file name, where it lies), in the order of the files and of the bytes in them"""
    problems: tuple[str, ...]


def read_files(folder: Path) -> Files:
    """Read the headers of all weight files and compare them with the index, if there is one. Raises OSError."""
    problems: list[str] = []
    weight_map = _read_index(folder / INDEX, problems) if (folder / INDEX).is_file() else None
    listed = _listed_files(folder, weight_map, problems)
    tensors: dict[str, tuple[str, StoredTensor]] = {}
    unread, twice = set(), defaultdict(list)
    for file in listed:
        try:
            header = read_header(folder / file)
        except FileNotFoundError:
            problems.append(f"{file} is missing{_named_by(file, weight_map)}; copy or download it")
        except DamagedFile as error:
            problems.append(f"{file} {error}")
        except OSError as error:
            problems.append(f"{file} cannot be read ({error}); make it readable, or copy it again")
        else:
            for tensor in header:
                if tensor.name in tensors:
                    twice[(tensors[tensor.name][0], file)].append(tensor.name)
                tensors.setdefault(tensor.name, (file, tensor))
            continue
        unread.add(file)
    for (first, second), names in twice.items():
        problems.append(f"{first} and {second} both hold {some(names)}; keep the file that belongs to the model")
    if weight_map is not None:
        problems += _index_problems(weight_map, tensors, unread)
    return Files(tensors=tensors, problems=tuple(problems))


def weight_problems(config: Mapping[str, Any], files: Files) -> Iterator[str]:
    """Yield a problem for quantisation that cannot be read, and for tensors that are no weights."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    settings_problem = _quantization_problem(quantization)
    if settings_problem:
        yield settings_problem
    fp8 = dict.fromkeys(name for name, (_, tensor) in files.tensors.items() if tensor.dtype == FP8_DTYPE)
    if not settings_problem and not files.problems:
        if method == "fp8" and not fp8:
            yield f"config.json says quant_method fp8, but no tensor is {FP8_DTYPE}; remove its quantization_config"
        if method != "fp8" and fp8:
            yield f"config.json tells of no FP8, but {some(fp8)} are {FP8_DTYPE}; copy config.json again"
        # Without the missing files, a weight may only look as if it had no scales.
        yield from _scale_problems(files.tensors, fp8)
    odd = defaultdict(list)
    for name, (_, tensor) in files.tensors.items():
        packed = method == "mxfp4" and tensor.dtype == "U8" and name.endswith(_MXFP4_SUFFIXES)
        if tensor.dtype not in (*_FLOATS, FP8_DTYPE) and not packed:
            odd[tensor.dtype].append(name)
    # Under a method that is refused as a whole, its tensors are no further mistake.
    if not settings_problem:
        for dtype, names in odd.items():
            yield (
                f"{some(names)}: {dtype} is no dtype of weights here; give the model's original weights "
                f"({', '.join(_FLOATS)}, or {FP8_DTYPE} with scales of {BLOCK} x {BLOCK} blocks)"
            )


def some(names: Iterable[str]) -> str:
    """List the names, or the first few and the number of the others."""
    names = list(names)
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _read_index(path: Path, problems: list[str]) -> dict[str, str] | None:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(type(file) is str for file in weight_map.values())
        ):
            raise ValueError("weight_map is not what it should be")
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(f"{path.name} cannot be read ({error}); copy or download it again")
        return None
    outside = sorted({file for file in weight_map.values() if Path(file).name != file})
    if outside:
        problems.append(f"{path.name} names files outside the folder: {some(outside)}; copy or download it again")
        return None
    return weight_map


def _listed_files(folder: Path, weight_map: Mapping[str, str] | None, problems: list[str]) -> list[str]:
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    shards = [name for name in present if _SHARD.fullmatch(name)]
    if weight_map is not None:
        # Other programs read model.safetensors before the index, and would see another model.
        if SINGLE in present and SINGLE not in weight_map.values():
            problems.append(f"{SINGLE} is not in {INDEX}; remove the one that does not belong to the model")
        return sorted(set(weight_map.values()))
    if not present:
        pickles = sorted(path.name for path in folder.iterdir() if path.name.endswith(PICKLE_SUFFIXES))
        if pickles:
            problems.append(
                f"the weights are pickles ({some(pickles)}), which can run programs when they are read; convert them "
                "to safetensors: load the model with transformers and save it with save_pretrained"
            )
        elif not problems:
            problems.append("no *.safetensors there; copy or download the weights")
        return []
    if SINGLE in present and not shards:
        return [SINGLE]
    if SINGLE in present:
        problems.append(f"{SINGLE} and {some(shards)} without {INDEX}; remove what does not belong to the model")
    return sorted({*present, *_missing_shards(shards)})


def _missing_shards(shards: Iterable[str]) -> Iterator[str]:
    """Yield the names that the numbers in the other names imply."""
    for prefix, width, of in {(match[1], len(match[2]), match[3]) for match in map(_SHARD.fullmatch, shards) if match}:
        yield from (f"{prefix}-{number:0{width}}-of-{of}.safetensors" for number in range(1, int(of) + 1))


def _named_by(file: str, weight_map: Mapping[str, str] | None) -> str:
    if weight_map is None:
        return ""
    return f", where {INDEX} has {sum(other == file for other in weight_map.values()):,} tensors"


def _index_problems(
    weight_map: Mapping[str, str], tensors: Mapping[str, tuple[str, StoredTensor]], unread: set[str]
) -> Iterator[str]:
    again = f"copy or download {INDEX} and the files again"
    elsewhere, absent = defaultdict(list), defaultdict(list)
    for name, file in weight_map.items():
        if file in unread:
            continue
        if name not in tensors:
            absent[file].append(name)
        elif tensors[name][0] != file:
            elsewhere[(file, tensors[name][0])].append(name)
    unlisted = defaultdict(list)
    for name, (file, _) in tensors.items():
        if name not in weight_map:
            unlisted[file].append(name)
    for file, names in absent.items():
        yield f"{file} does not hold {some(names)}, which {INDEX} has there; {again}"
    for (file, other), names in elsewhere.items():
        yield f"{other} holds {some(names)}, which {INDEX} has in {file}; {again}"
    for file, names in unlisted.items():
        yield f"{file} holds {some(names)}, which {INDEX} does not name; {again}"


def _quantization_problem(quantization: Any) -> str | None:
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        return "config.json: quantization_config is no dictionary; copy config.json again"
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return None
    if method != "fp8":
        return (
            f"config.json: weights quantised by {method!r} cannot be read; give the model's original weights, or FP8 "
            f"in blocks of {BLOCK} x {BLOCK}"
        )
    for key, value, wanted in (
        ("weight_block_size", quantization.get("weight_block_size"), [BLOCK, BLOCK]),
        ("activation_scheme", quantization.get("activation_scheme", "dynamic"), "dynamic"),
        ("fmt", quantization.get("fmt", "e4m3"), "e4m3"),
    ):
        if value != wanted:
            return f"config.json: FP8 with {key} = {value!r} cannot be read, only {wanted!r}; give the original weights"
    return None


def _scale_problems(tensors: Mapping[str, tuple[str, StoredTensor]], fp8: Collection[str]) -> Iterator[str]:
    without = [name for name in tensors if name in fp8 and name + SCALE_SUFFIX not in tensors]
    if without:
        yield f"FP8 without {SCALE_SUFFIX.removeprefix('_')}: {some(without)}; download the model again"
    orphans = [name for name in tensors if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) not in fp8]
    if orphans:
        yield f"scales of no FP8 weight: {some(orphans)}; download the model again"
    wrong = []
    for name in tensors:
        if name not in fp8 or name + SCALE_SUFFIX not in tensors:
            continue
        weight, scale = tensors[name][1], tensors[name + SCALE_SUFFIX][1]
        wanted = scale_shape(*weight.shape) if len(weight.shape) == 2 else None
        if scale.shape != wanted or scale.dtype not in _SCALES:
            wrong.append(f"{name} {list(weight.shape)} with scales {list(scale.shape)} {scale.dtype}")
    if wrong:
        yield (
            f"scales that are not of {BLOCK} x {BLOCK} blocks in {', '.join(_SCALES)}: {some(wrong)}; give the "
            "model's original weights"
        )


assert set(_FLOATS) | {FP8_DTYPE} <= DTYPES.keys()

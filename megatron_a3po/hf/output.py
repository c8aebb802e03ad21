"""Write a Hugging Face folder that appears under its name when it is whole.

.NAME.unfinished/    the folder while it is written; a later start with the same plan keeps completed shards
    .plan.json       {"format": 1, "fingerprint": "9f86..."}: which weights the shards belong to
    model-00001-of-00002.safetensors ...
    config.json, tokenizer files, ... of the source folder
.NAME.replaced/      the folder that had the name before, between two renames
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_a3po.config.model_folder import read_model_config
from megatron_a3po.errors import CheckpointError, ConfigError
from megatron_a3po.hf.folder_checks import INDEX, PICKLE_SUFFIXES, some
from megatron_a3po.hf.safetensors_format import DTYPE_NAMES, DamagedFile, read_header
from megatron_a3po.hf.safetensors_writer import SafetensorsWriter
from megatron_a3po.hf.shards import ShardFile
from megatron_a3po.runtime.files import (
    ensure_space,
    give_name,
    sync_folder,
    sync_tree,
    unfinished_path,
    write_durably,
    writing,
)

_PLAN = ".plan.json"
_PLAN_FORMAT = 1
_WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".gguf", ".h5", ".msgpack", ".onnx", *PICKLE_SUFFIXES)
_COPIED_FOLDERS = ("additional_chat_templates",)
_SPARE_BYTES = 1 << 20
"""For each shard, besides its tensors: header and file system"""


@dataclass(frozen=True, kw_only=True, slots=True)
class HfOutput:
    """The folder `target`, with given weights and all else from `source`.

    shards = plan_shards(...)
    done = output.begin(shards, origin=...)
    for each shard whose file name is not in `done`:
        with output.writer(shard) as writer:
            writer.append(name, tensor) ...
    output.finish(shards)

    One process begins and finishes. Several may write the shards, if they wait for each other before `finish`.
    """

    target: Path
    source: Path
    """the Hugging Face folder whose configuration, tokenizer and other files are copied"""
    quantization_config: Mapping[str, Any] | None = None
    """of the new weights, for config.json; None: they are not quantised, whatever the source's are"""
    replace: bool = False
    """replace a folder that has the name; else it is refused"""

    @property
    def folder(self) -> Path:
        """The folder in which everything is written until `finish`."""
        return unfinished_path(self.target)

    @property
    def _replaced(self) -> Path:
        return self.target.with_name(f".{self.target.name}.replaced")

    def begin(self, shards: Sequence[ShardFile] = (), *, origin: str | None = None) -> frozenset[str]:
        """Make the folder with all files but the weights and config.json.

        Returns the file names of the shards that an earlier start completed. `origin` identifies the weights, for
        example by a checkpoint's checksum: shards are kept only from a start with the same origin, shards and
        quantisation. None: nothing is kept. Raises ConfigError for folders that cannot be used, and CheckpointError if
        the disk is too small for the rest or cannot be written.
        """
        with self._writing():
            self._refuse_bad_folders()
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._undo_half_replacement()
            fingerprint = self._fingerprint(shards, origin)
            done = self._completed(shards) if origin is not None and self._leftover_of() == fingerprint else frozenset()
            self._clear(keep=done)
            copied = model_files(self.source)
            left = [shard for shard in shards if shard.file_name not in done]
            ensure_space(
                self.target.parent,
                sum(shard.nbytes + _SPARE_BYTES for shard in left) + sum(path.stat().st_size for path, _ in copied),
                f"{self.target}: what is left to write",
                "no weights were written; make room, or give a folder on another filesystem",
            )
            self.folder.mkdir(exist_ok=True)
            sync_folder(self.target.parent)
            write_durably(self.folder / _PLAN, json.dumps({"format": _PLAN_FORMAT, "fingerprint": fingerprint}) + "\n")
            for path, name in copied:
                (self.folder / name).parent.mkdir(exist_ok=True)
                # Without the permissions: a file that may not be written could not be changed or replaced later.
                shutil.copyfile(path, self.folder / name)
        return done

    def writer(self, shard: ShardFile) -> SafetensorsWriter:
        """Return a writer for the tensors of one shard."""
        return SafetensorsWriter(self.folder / shard.file_name, shard.tensors)

    def finish(self, shards: Sequence[ShardFile], *, elsewhere: bool = False) -> None:
        """Write index and config.json and give the folder its name. `elsewhere`: the shards are not in this folder.

        Raises CheckpointError, also if a shard is missing or holds other tensors.
        """
        with self._writing():
            done = self._completed(shards) if not elsewhere else frozenset(shard.file_name for shard in shards)
            missing = [shard.file_name for shard in shards if shard.file_name not in done]
            if missing or not shards:
                what = f"shards not written: {some(missing)}; start again" if missing else "no tensor to write"
                raise CheckpointError(f"{self.target}: {what}")
            weight_map = {spec.name: shard.file_name for shard in shards for spec in shard.tensors}
            if len(shards) > 1:
                index = {"metadata": {"total_size": sum(shard.nbytes for shard in shards)}, "weight_map": weight_map}
                _write_json(self.folder / INDEX, index)
            _write_json(self.folder / "config.json", self._config(shards))
            (self.folder / _PLAN).unlink()
            sync_tree(self.folder)
            self._give_name()

    def _refuse_bad_folders(self) -> None:
        read_model_config(self.source)
        if not self.target.name:
            raise ConfigError(f"{self.target}: the folder needs a name; give its path with the name")
        if self.target.is_dir() and not self.replace and any(self.target.iterdir()):
            raise ConfigError(f"{self.target}: is there and not empty; give another folder, or remove it")
        if self.target.exists() and not self.target.is_dir():
            raise ConfigError(f"{self.target}: is there and no folder; give another one")
        target, source = self.target.resolve(), self.source.resolve()
        if target == source or target in source.parents:
            raise ConfigError(f"{self.target}: would replace {self.source}, which is read; give another folder")

    def _undo_half_replacement(self) -> None:
        """Undo the first of two renames: a start that ended between them left the name free."""
        if self._replaced.exists() and not self.target.exists():
            self._replaced.rename(self.target)
        elif self._replaced.exists():
            shutil.rmtree(self._replaced)

    def _fingerprint(self, shards: Sequence[ShardFile], origin: str | None) -> str:
        tensors = [
            [shard.file_name, [[spec.name, DTYPE_NAMES[spec.dtype], *spec.shape] for spec in shard.tensors]]
            for shard in shards
        ]
        plan = json.dumps([origin, self.quantization_config, tensors], sort_keys=True)
        return hashlib.sha256(plan.encode()).hexdigest()

    def _leftover_of(self) -> str | None:
        """Return the fingerprint of the start that left an unfinished folder."""
        try:
            record = json.loads((self.folder / _PLAN).read_bytes())
            return record["fingerprint"] if record["format"] == _PLAN_FORMAT else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _completed(self, shards: Sequence[ShardFile]) -> frozenset[str]:
        """Return the shards that are whole: a file has its name when its bytes are on the disk, and its header fits."""
        return frozenset(shard.file_name for shard in shards if _holds(self.folder / shard.file_name, shard))

    def _clear(self, keep: frozenset[str]) -> None:
        for path in self.folder.iterdir() if self.folder.exists() else ():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in keep:
                path.unlink()

    def _config(self, shards: Sequence[ShardFile]) -> dict[str, Any]:
        config = read_model_config(self.source)
        for key in ("quantization_config", "compression_config"):
            config.pop(key, None)
        if self.quantization_config is not None:
            config["quantization_config"] = dict(self.quantization_config)
        sizes: Counter[str] = Counter()
        for spec in (spec for shard in shards for spec in shard.tensors):
            if spec.dtype.is_floating_point and spec.dtype.itemsize > 1:
                sizes[str(spec.dtype).removeprefix("torch.")] += spec.nbytes
        if sizes:
            # The old name where there is none: all versions of transformers read it.
            keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
            config |= dict.fromkeys(keys, sizes.most_common(1)[0][0])
        return config

    def _give_name(self) -> None:
        if self.replace and self.target.exists():
            self.target.rename(self._replaced)
        give_name(self.target)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def _writing(self) -> AbstractContextManager[None]:
        remedy = f"what was written is in {self.folder}; make room, or give another folder, and start again"
        return writing(self.target, remedy)


def model_files(source: Path) -> list[tuple[Path, str]]:
    """Return (path, name below the folder) of all files that are neither weights nor config.json nor hidden."""
    paths = [path for folder in (source, *(source / name for name in _COPIED_FOLDERS)) for path in folder.glob("[!.]*")]
    return [
        (path, path.relative_to(source).as_posix())
        for path in sorted(paths)
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES) and path != source / "config.json"
    ]


def _holds(path: Path, shard: ShardFile) -> bool:
    try:
        stored = {tensor.name: (tensor.dtype, tensor.shape) for tensor in read_header(path)}
    except (OSError, DamagedFile):
        return False
    return stored == {spec.name: (DTYPE_NAMES[spec.dtype], spec.shape) for spec in shard.tensors}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_durably(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

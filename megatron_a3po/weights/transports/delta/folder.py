"""Versions as changes: what a run writes to shared storage, and what rollout machines make of it on their own.

FOLDER/published.json                           the last version: which files make which shard
FOLDER/start_5f1c09aa/                          of one start of the run
    model/                                      a Hugging Face folder, but for its shards
    model-00001-of-00002.0.whole.safetensors    a shard, so that nothing but this folder is needed
    model-00001-of-00002.1.delta.safetensors    what has changed in it since, see delta.py
FOLDER/followers/HOST                           the folder that the machine holds, below its LOCAL
FOLDER/publish.lock                             held by the run that publishes

LOCAL/version_00000018_9f86d081884c/            for the servers; the name tells the version and the bytes
    .published.json                             what it was made from
LOCAL/.version_..._....unfinished/              while it is made of the version before; of no use if that is interrupted
LOCAL/delta.lock                            held by the process that makes these
"""

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_a3po.errors import PublishError
from megatron_a3po.hf.output import sync_tree
from megatron_a3po.hf.safetensors_format import DamagedFile, read_header
from megatron_a3po.runtime.files import sync_folder, write_durably
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.run_dir import FolderLock, lock_folder
from megatron_a3po.weights.transports.delta.encoding import Delta, apply_delta

MODEL = "model"
PUBLISHED = "published.json"
_HELD = f".{PUBLISHED}"
_LOCAL_NAME = re.compile(r"version_\d{8}_[0-9a-f]{12}|\.version_\d{8}_[0-9a-f]{12}\.unfinished")
_PIECE_BYTES = 1 << 24
_THREADS = min(8, os.cpu_count() or 1)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Whole(_Record):
    """A file with all of a shard."""

    file: str
    checksum: str


class Change(_Record):
    """A file with what makes of the shard with checksum `base` the one with `checksum`."""

    file: str
    base: str
    checksum: str
    nbytes: int


class PublishedShard(_Record):
    """One bucket, as a file of the Hugging Face folder."""

    name: str
    whole: Whole
    changes: tuple[Change, ...] = ()

    @property
    def checksum(self) -> str:
        return self.changes[-1].checksum if self.changes else self.whole.checksum

    @property
    def files(self) -> list[str]:
        return [self.whole.file, *(change.file for change in self.changes)]

    def changes_since(self, held: str | None) -> tuple[Change, ...] | None:
        """What leads from the shard with the checksum `held` to this version; None if nothing does."""
        if held == self.checksum:
            return ()
        starts = [number for number, change in enumerate(self.changes) if change.base == held]
        return self.changes[starts[-1] :] if starts else None


class Published(_Record):
    """A version."""

    format: Literal[1] = 1
    version: int
    start: str
    """the folder of the start of the run that has published it"""
    shards: tuple[PublishedShard, ...]

    @property
    def folder_name(self) -> str:
        """Below LOCAL. Two folders with this name hold the same bytes."""
        content = [self.start, *(text for shard in self.shards for text in (shard.name, shard.checksum))]
        return f"version_{self.version:08d}_{hashlib.sha256(' '.join(content).encode()).hexdigest()[:12]}"


def read_published(path: Path) -> Published | None:
    """None where there is none, or one that cannot be read."""
    try:
        return Published.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def described_by(model: Path, folder: Path, local: Path | None) -> Path:
    """Where config.json of a server's `model` is seen here: for a version below LOCAL on its machine, in FOLDER."""
    published = read_published(folder / PUBLISHED) if local and model.parent == local.absolute() else None
    return folder / published.start / MODEL if published is not None else model


def checksum(header: bytes, data: torch.Tensor) -> str:
    """Of a shard: SHA-256 over those of its header and of pieces of 16 MiB of `data` [bytes] uint8, on the CPU."""
    view = memoryview(data.numpy())
    pieces = [header, *(view[start : start + _PIECE_BYTES] for start in range(0, len(view), _PIECE_BYTES))]
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = threads.map(lambda piece: hashlib.sha256(piece).digest(), pieces)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def lock_local(local: Path) -> FolderLock:
    """Take LOCAL for this process, for `make_local_folder`. Raises ConfigError while another one makes folders there,
    and OSError."""
    local.mkdir(parents=True, exist_ok=True)
    return lock_folder(local, "publish.delta_folder", "delta.lock")


def make_local_folder(folder: Path, local: Path, published: Published) -> Path:
    """LOCAL/version_..., by changes to the version that is there, and from whole shards where it cannot be; returns it.

    Versions of other starts are removed from LOCAL, which must be this process's (`lock_local`). Every byte is checked,
    also of a folder that is there. Raises PublishError for damaged files in `folder`, and OSError, also when these are
    replaced by those of a later version meanwhile.
    """
    target = local / published.folder_name
    unfinished = local / f".{target.name}.unfinished"
    local.mkdir(parents=True, exist_ok=True)
    former = _newest(local, published.start)
    for path in [path for path in local.iterdir() if _LOCAL_NAME.fullmatch(path.name)]:
        if former is None or path.name != former.folder_name:
            shutil.rmtree(path)
    if former is not None:
        (local / former.folder_name).rename(unfinished)
    else:
        shutil.copytree(folder / published.start / MODEL, unfinished, copy_function=shutil.copyfile)
    held = {shard.name: shard.checksum for shard in former.shards} if former is not None else {}
    for shard in published.shards:
        _update_shard(folder / published.start, unfinished, held.get(shard.name), shard)
    write_durably(unfinished / _HELD, published.model_dump_json())
    sync_tree(unfinished)
    unfinished.rename(target)
    sync_folder(local)
    return target


def _newest(local: Path, start: str) -> Published | None:
    """What the last folder of this start of the run was made from."""
    found = {path.name: read_published(path / _HELD) for path in local.glob("version_*")}
    ours = [held for name, held in found.items() if held and held.start == start and held.folder_name == name]
    return max(ours, key=lambda held: held.version, default=None)


def _update_shard(source: Path, unfinished: Path, held: str | None, shard: PublishedShard) -> None:
    """held: the checksum of the file that is there."""
    path = unfinished / shard.name
    changes = shard.changes_since(held)
    if changes is not None:
        if _update_file(source, path, shard, changes):
            return
        logger.warning("%s or a file with changes to it is damaged; the whole shard is copied", path)
    shutil.copyfile(source / shard.whole.file, path)
    if not _update_file(source, path, shard, shard.changes_since(shard.whole.checksum) or ()):
        raise PublishError(f"{source}: the files of {shard.name} are damaged; start the run again, which writes others")


def _update_file(source: Path, path: Path, shard: PublishedShard, changes: Sequence[Change]) -> bool:
    """Whether the file is what it should be when it has changed."""
    try:
        start = read_header(path)[0].start
        file = torch.from_numpy(np.memmap(path, mode="r+"))
        for change in changes:
            apply_delta(Delta(**load_file(source / change.file)), file[start:])
    except (DamagedFile, FileNotFoundError, SafetensorError, IndexError, TypeError, ValueError, RuntimeError):
        return False
    return checksum(file[:start].numpy().tobytes(), file[start:]) == shard.checksum

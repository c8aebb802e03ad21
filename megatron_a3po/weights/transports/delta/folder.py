"""Versions as changes: what a run writes to shared storage, and the folders that rollout machines make of it.

FOLDER/published.json                           the last version: which files make which shard
FOLDER/start_5f1c09aa/                          the files of one start of the run
    model/                                      a Hugging Face folder, but for its shards
    model-00001-of-00002.0.whole.safetensors    a whole shard
    model-00001-of-00002.1.delta.safetensors    what has changed in it since, see encoding.py
FOLDER/followers/HOST                           the folder that the machine holds, below its LOCAL
FOLDER/publish.lock                             held by the run that publishes

LOCAL/version_00000018_9f86d081884c/            for the servers; the name tells the version and the bytes
    .published.json                             what it was made from
LOCAL/.version_..._....unfinished/              while it is made from the version before; made anew if interrupted
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
from megatron_a3po.hf.safetensors_format import DamagedFile, read_header
from megatron_a3po.runtime.files import FileLock, give_name, sync_tree, unfinished_path, write_durably
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.run_dir import lock_folder
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
    """A file with the changes that turn the shard with checksum `base` into the one with `checksum`."""

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
        """Return the changes from the shard with the checksum `held` to this version; None if there are none."""
        if held == self.checksum:
            return ()
        starts = [number for number, change in enumerate(self.changes) if change.base == held]
        return self.changes[starts[-1] :] if starts else None


class Published(_Record):
    """A published version: the files of all its shards."""

    format: Literal[1] = 1
    version: int
    start: str
    """The folder of the start of the run that has published it"""
    shards: tuple[PublishedShard, ...]

    @property
    def folder_name(self) -> str:
        """The folder's name below LOCAL. Two folders with the same name hold the same bytes."""
        content = [self.start, *(text for shard in self.shards for text in (shard.name, shard.checksum))]
        return f"version_{self.version:08d}_{hashlib.sha256(' '.join(content).encode()).hexdigest()[:12]}"


def read_published(path: Path) -> Published | None:
    """Read the record of a version; return None if there is none, or it cannot be read."""
    try:
        return Published.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def described_by(model: Path, folder: Path, local: Path | None) -> Path:
    """Return the folder with config.json of a server's `model` that is visible here.

    For a version below LOCAL on the server's machine, that is the `model` folder in FOLDER.
    """
    published = read_published(folder / PUBLISHED) if local and model.parent == local.absolute() else None
    return folder / published.start / MODEL if published is not None else model


def checksum(header: bytes, data: torch.Tensor) -> str:
    """Return a shard's checksum: SHA-256 over the SHA-256 of its header and of each 16 MiB of `data` [bytes] uint8."""
    view = memoryview(data.numpy())
    pieces = [header, *(view[start : start + _PIECE_BYTES] for start in range(0, len(view), _PIECE_BYTES))]
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = threads.map(lambda piece: hashlib.sha256(piece).digest(), pieces)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def lock_local(local: Path) -> FileLock:
    """Lock LOCAL for this process, which then may call `make_local_folder`.

    Raises ConfigError while another process makes folders there, and OSError.
    """
    local.mkdir(parents=True, exist_ok=True)
    return lock_folder(local, "publish.delta_folder", "delta.lock")


def make_local_folder(folder: Path, local: Path, published: Published) -> Path:
    """Make LOCAL/version_... and return it: by changes to the version that is there, else from whole shards.

    Removes other versions from LOCAL, which this process must have locked (`lock_local`). Checks every byte, also of a
    folder that is there. Raises PublishError for damaged files in `folder`, and OSError, also when a later version
    replaces these files meanwhile.
    """
    target = local / published.folder_name
    unfinished = unfinished_path(target)
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
    give_name(target)
    return target


def _newest(local: Path, start: str) -> Published | None:
    """Return the record of the newest folder that this start of the run made."""
    found = {path.name: read_published(path / _HELD) for path in local.glob("version_*")}
    ours = [held for name, held in found.items() if held and held.start == start and held.folder_name == name]
    return max(ours, key=lambda held: held.version, default=None)


def _update_shard(source: Path, unfinished: Path, held: str | None, shard: PublishedShard) -> None:
    """Bring the shard's file up to date. held: its checksum; None: there is no file."""
    path = unfinished / shard.name
    changes = shard.changes_since(held)
    if changes is not None:
        if _update_file(source, path, shard, changes):
            return
        logger.warning("%s or a file with changes to it is damaged; the whole shard is copied", path)
    shutil.copyfile(source / shard.whole.file, path)
    if not _update_file(source, path, shard, shard.changes_since(shard.whole.checksum) or ()):
        raise PublishError(f"{source}: the files of {shard.name} are damaged; restart the run, which writes new ones")


def _update_file(source: Path, path: Path, shard: PublishedShard, changes: Sequence[Change]) -> bool:
    """Apply the changes to the file, and return whether its checksum is then right."""
    try:
        start = read_header(path)[0].start
        file = torch.from_numpy(np.memmap(path, mode="r+"))
        for change in changes:
            apply_delta(Delta(**load_file(source / change.file)), file[start:])
    except (DamagedFile, FileNotFoundError, SafetensorError, IndexError, TypeError, ValueError, RuntimeError):
        return False
    return checksum(file[:start].numpy().tobytes(), file[start:]) == shard.checksum

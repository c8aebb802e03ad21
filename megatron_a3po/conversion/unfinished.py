"""The output folder of a conversion that can be interrupted and continued.

The folder is `.NAME.unfinished` until it is whole. Notes in it say, file by file, what is done. They count only for the
same work, which a fingerprint tells.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from megatron_a3po.conversion.processes import Processes
from megatron_a3po.errors import CheckpointError
from megatron_a3po.runtime.files import FileLock, ensure_space, give_name, sync_folder, unfinished_path, write_durably

_NOTES = ".conversion"
_claimed: dict[Path, FileLock] = {}
"""Unfinished folders that this process has locked."""


def claim_target(target: Path) -> None:
    """Make and lock the unfinished folder of `target`, until this process ends: two conversions would mix their files.

    Raises CheckpointError for a target that cannot be made, or that another conversion is making.
    """
    if not target.name or target.is_symlink() or os.path.ismount(target):
        raise CheckpointError(f"{target}: give the path of a folder that is yet to be made, no link and no mount point")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: is there already; give another folder, or remove it")
    path = unfinished_path(target)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise CheckpointError(f"{path}: is in the way of the conversion; remove it")
    path.mkdir(parents=True, exist_ok=True)
    if (former := _claimed.pop(path.resolve(), None)) is not None:  # of an earlier attempt of this process
        former.release()
    lock = FileLock(path)
    try:
        lock.take()
    except BlockingIOError:
        lock.release()
        raise CheckpointError(f"{target}: another conversion is making it; wait for its end, or end it") from None
    _claimed[path.resolve()] = lock


class UnfinishedFolder:
    """The folder that a conversion writes. All methods but `note` and `noted` are collective over the processes."""

    def __init__(self, target: Path, work: Any, needed_bytes: int, processes: Processes) -> None:
        """Claim the target, and keep what an earlier attempt at the same work has done.

        `work`: a JSON value that tells this conversion from others. `needed_bytes`: what will be written in all.
        Raises CheckpointError when `target` is there already, or the disk is too small.
        """
        self._target = target
        self._processes = processes
        self.path = unfinished_path(target)
        self._notes = self.path / _NOTES
        fingerprint = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()
        processes.on_rank_zero(lambda: self._prepare(fingerprint, needed_bytes))

    def _prepare(self, fingerprint: str, needed_bytes: int) -> None:
        claim_target(self._target)
        kept = self._notes / "fingerprint"
        if not kept.exists() or kept.read_bytes() != fingerprint.encode():
            for path in self.path.iterdir():  # the folder itself stays, since it is locked
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            self._notes.mkdir()
            write_durably(kept, fingerprint)
        there = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
        remedy = "free space, or give a folder elsewhere"
        ensure_space(self.path, needed_bytes - there, f"{self._target}: what is left to write", remedy)

    def note(self, name: str, value: Any) -> None:
        """Remember a JSON value under this name: what was done, and is on the disk."""
        write_durably(self._notes / f"{name}.json", json.dumps(value))

    def noted(self, name: str) -> Any:
        """Return what was noted under this name, maybe by an earlier attempt; None if nothing was."""
        try:
            return json.loads((self._notes / f"{name}.json").read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return None

    def finish(self) -> None:
        """Give the folder its name, once every process has written and noted its share."""
        self._processes.on_rank_zero(self._give_name)

    def _give_name(self) -> None:
        shutil.rmtree(self._notes)
        sync_folder(self.path)
        give_name(self._target)

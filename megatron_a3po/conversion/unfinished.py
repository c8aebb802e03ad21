"""An output folder that appears under its name when it is whole, and whose making can be interrupted and gone on with.

Until then it is `.NAME.unfinished` beside its place. What is done there is noted in it file by file; the notes count
only for the same work, which a fingerprint tells.
"""

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from megatron_a3po.conversion.processes import Processes
from megatron_a3po.errors import CheckpointError
from megatron_a3po.runtime.files import sync_folder, write_durably

_NOTES = ".conversion"
_claimed: dict[Path, int] = {}
"""Unfinished folders that this process has locked, and the descriptors that hold the locks."""


def claim_target(target: Path) -> None:
    """Refuse a target that cannot be made, or that another conversion is making: two would mix their files.

    The lock is on the unfinished folder, and ends with this process. Raises CheckpointError.
    """
    if not target.name or target.is_symlink() or os.path.ismount(target):
        raise CheckpointError(f"{target}: give the path of a folder that is yet to be made, no link and no mount point")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: is there already; give another folder, or remove it")
    path = unfinished_path(target)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise CheckpointError(f"{path}: is in the way of the conversion; remove it")
    path.mkdir(parents=True, exist_ok=True)
    if path.resolve() in _claimed:  # by an attempt of this very process
        os.close(_claimed.pop(path.resolve()))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(f"{target}: another conversion is making it; wait for its end, or end it") from None
    _claimed[path.resolve()] = descriptor


def unfinished_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.unfinished")


class UnfinishedFolder:
    """All methods are collective over the processes, but for `note` and `noted`."""

    def __init__(self, target: Path, work: Any, needed_bytes: int, processes: Processes) -> None:
        """`work`: a JSON value that tells this conversion from others. `needed_bytes`: what will be written in all.

        Raises CheckpointError when `target` is there already, or the disk is too small.
        """
        self._target = target
        self._processes = processes
        self.path = unfinished_path(target) if target.name else target
        self._notes = self.path / _NOTES
        fingerprint = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()
        processes.on_rank_zero(lambda: self._prepare(fingerprint, needed_bytes))

    def _prepare(self, fingerprint: str, needed_bytes: int) -> None:
        claim_target(self._target)
        kept = self._notes / "fingerprint"
        if not kept.exists() or kept.read_bytes() != fingerprint.encode():
            for path in self.path.iterdir():  # the folder itself stays, which is locked
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            self._notes.mkdir()
            write_durably(kept, fingerprint)
        there = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
        free = shutil.disk_usage(self.path).free
        if needed_bytes - there > free:
            raise CheckpointError(
                f"{self._target}: needs {needed_bytes - there:,} bytes ({(needed_bytes - there) / 2**30:.1f} GiB), and "
                f"its filesystem has {free:,} ({free / 2**30:.1f} GiB) free; free space, or give a folder elsewhere"
            )

    def note(self, name: str, value: Any) -> None:
        """Remember (JSON) what was done under this name, whose files are on the disk."""
        write_durably(self._notes / f"{name}.json", json.dumps(value))

    def noted(self, name: str) -> Any:
        """What was noted under this name, maybe by an earlier attempt; None if nothing was."""
        try:
            return json.loads((self._notes / f"{name}.json").read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return None

    def finish(self) -> None:
        """Give the folder its name. Before, every process must have written and noted its share."""
        self._processes.on_rank_zero(self._give_name)

    def _give_name(self) -> None:
        shutil.rmtree(self._notes)
        sync_folder(self.path)
        if self._target.exists():
            self._target.rmdir()
        os.rename(self.path, self._target)
        sync_folder(self._target.parent)

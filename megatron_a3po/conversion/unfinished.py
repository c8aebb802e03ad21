"""An output folder that appears under its name when it is whole, and whose making can be interrupted and gone on with.

Until then it is `.NAME.unfinished` beside its place. What is done there is noted in it file by file; the notes count
only for the same work, which a fingerprint tells.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from megatron_a3po.conversion.processes import Processes
from megatron_a3po.errors import CheckpointError
from megatron_a3po.runtime.durable import sync_folder, write_durably

_NOTES = ".conversion"


class UnfinishedFolder:
    """All methods are collective over the processes, but for `note` and `noted`."""

    def __init__(self, target: Path, work: Any, needed_bytes: int, processes: Processes) -> None:
        """`work`: a JSON value that tells this conversion from others. `needed_bytes`: what will be written in all.

        Raises CheckpointError when `target` is there already, or the disk is too small.
        """
        self._target = target
        self._processes = processes
        self.path = target.with_name(f".{target.name}.unfinished")
        self._notes = self.path / _NOTES
        fingerprint = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()
        processes.on_rank_zero(lambda: self._prepare(fingerprint, needed_bytes))

    def _prepare(self, fingerprint: str, needed_bytes: int) -> None:
        if self._target.exists() and (not self._target.is_dir() or any(self._target.iterdir())):
            raise CheckpointError(f"{self._target}: is there already; give another folder, or remove it")
        kept = self._notes / "fingerprint"
        if not kept.exists() or kept.read_text(encoding="utf-8") != fingerprint:
            if self.path.exists():
                shutil.rmtree(self.path)
            self._notes.mkdir(parents=True)
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
        file = self._notes / f"{name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

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

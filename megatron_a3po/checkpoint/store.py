"""The folder `run_dir/checkpoints`: a checkpoint appears in it whole or not at all, and retention deletes old ones.

    step_00000020/             a checkpoint: files of many ranks and `manifest.json` (format: runtime/manifest.py)
    latest                     one line, the name of the newest checkpoint, for people and tools; this program does not
                               read it, since it may be older than the folders, or damaged
    .step_00000030.unfinished/ a save in progress, or the rest of a save that was killed
    .step_00000010.deleted/    the rest of a checkpoint that retention deleted
    step_00000040.set_aside/   a checkpoint that a resumed run does not continue; for people to look at and remove
    resumed_from               the checkpoint that the user named to resume from (checkpoint/resume.py)

A save takes these steps (checkpoint/manager.py):

    1. Rank 0 calls begin(step).
    2. All ranks write into unfinished_folder(step), close their files and describe them.
    3. Rank 0 gathers the descriptions and calls commit.

The order on the disk is: every file of the checkpoint, the manifest, the names in the folder, the folder's final name,
`latest`. Only then are older checkpoints deleted. So whenever the run ends, even by a power cut, each `step_...` folder
is whole, and the last whole one is still there.
"""

import errno
import os
import re
import shutil
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from megatron_a3po.errors import CheckpointError
from megatron_a3po.runtime.files import ensure_space, give_name, sync_folder, unfinished_path, write_durably
from megatron_a3po.runtime.manifest import (
    ContentError,
    FileRecord,
    Manifest,
    UnreadableError,
    check,
    folder_name,
    step_of,
    unreadable,
    write_manifest,
)

_LEFTOVER = re.compile(r"\.step_[0-9]{8,}\.(unfinished|deleted)")


class CheckpointStore:
    """The checkpoints of one run. Only rank 0 calls methods that write, for one save at a time."""

    def __init__(self, root: Path, *, keep_last: int, keep_every: int) -> None:
        """`root`: the run's `checkpoints` folder, made by the first save. Retention: see `steps_to_delete`."""
        assert keep_last >= 1 and keep_every >= 0, (keep_last, keep_every)
        self._root = root
        self._keep_last, self._keep_every = keep_last, keep_every

    def candidates(self) -> list[Path]:
        """Return the folders with the name of a checkpoint, newest step first; they may be damaged."""
        return checkpoint_folders(self._root)

    def unfinished_folder(self, step: int) -> Path:
        """Return the folder in which all ranks write the checkpoint of this step, between `begin` and `commit`."""
        return unfinished_path(self._root / folder_name(step))

    def begin(self, step: int, needed_bytes: int = 0) -> Path:
        """Remove the rest of killed saves, check that `needed_bytes` are free and make the empty unfinished folder.

        Raises CheckpointError, also when a checkpoint of this or a later step is there: retention and resuming go by
        the step, so checkpoints that the run does not continue have to be set aside first.
        """
        with self.saving(step):
            self._refuse_later_steps(step)
            self._root.mkdir(parents=True, exist_ok=True)
            sync_folder(self._root.parent)
            self._remove_leftovers()
            self.ensure_space(needed_bytes)
            self.unfinished_folder(step).mkdir()
        return self.unfinished_folder(step)

    def commit(self, step: int, records: Mapping[str, FileRecord], facts: Mapping[str, Any]) -> Path:
        """Turn the unfinished folder into the newest checkpoint, delete old checkpoints, and return the new folder.

        `records`: the results of `describe_files` on all ranks, merged. `facts`: any JSON. Raises CheckpointError.
        """
        folder = self._root / folder_name(step)
        with self.saving(step):
            write_manifest(self.unfinished_folder(step), step, records, facts)
            give_name(folder)
            write_durably(self._root / "latest", f"{folder.name}\n")
            self._delete_old()
        return folder

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Turn an OSError (a full disk, a lost mount) into a CheckpointError that tells which checkpoint is usable.

        `begin` and `commit` do this themselves; use it around code that writes and describes the files.
        """
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._root}: the checkpoint of step {step} could not be saved: {error}; {self._usable()}; "
                f"{_remedy(error)}"
            ) from error

    def ensure_space(self, needed_bytes: int) -> None:
        """Raise CheckpointError if the filesystem has fewer bytes free. It cannot see a quota."""
        remedy = f"nothing was written; {self._usable()}; {_MAKE_ROOM}"
        ensure_space(self._root, needed_bytes, f"{self._root}: a checkpoint", remedy)

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps than the resumed one, and return the new paths. Raises OSError.

        `step` is -1 if none was resumed. The later ones are damaged, or the run does not continue them. With their
        names, the next `auto` resume would choose them, and retention would count them.
        """
        later = [path for path in self.candidates() if (step_of(path) or 0) > step]
        renamed = [(path, _free_name(path.with_name(f"{path.name}.set_aside"))) for path in later]
        for path, target in renamed:
            os.rename(path, target)
        if renamed:
            sync_folder(self._root)
        return [target for _, target in renamed]

    def _refuse_later_steps(self, step: int) -> None:
        later = [path.name for path in self.candidates() if (step_of(path) or 0) >= step]
        if later:
            raise CheckpointError(
                f"{self._root}: the checkpoint of step {step} cannot be saved beside {', '.join(later)}: this step is "
                "saved already, or these belong to a course of the run that did not resume from them; move them away "
                "or remove them"
            )

    def _delete_old(self) -> None:
        steps = [step for path in self.candidates() if (step := step_of(path)) is not None]
        doomed = steps_to_delete(steps, keep_last=self._keep_last, keep_every=self._keep_every)
        for step in doomed:
            os.rename(self._root / folder_name(step), self._root / f".{folder_name(step)}.deleted")
        # First the names, then the files: a power cut must not bring back the name of a half-deleted folder.
        sync_folder(self._root)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        for path in self._root.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                # What cannot be deleted now (NFS keeps open files as .nfs...) goes before the next save; if it keeps
                # that one from starting, mkdir says so.
                shutil.rmtree(path, ignore_errors=True)

    def _usable(self) -> str:
        try:
            newest = next(iter(self.candidates()), None)
        except UnreadableError:
            return "what is there cannot be listed now"
        return f"{newest.name} was saved whole and can be resumed" if newest else "there is no other checkpoint"


def checkpoint_folders(root: Path) -> list[Path]:
    """Return the folders with the name of a checkpoint, newest step first. Only `check` tells which are valid.

    Raises UnreadableError.
    """
    try:
        if not root.is_dir():
            return []
        steps = {path: step for path in root.iterdir() if (step := step_of(path)) is not None and path.is_dir()}
    except OSError as error:
        raise unreadable(root, error) from error
    return sorted(steps, key=steps.__getitem__, reverse=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The newest valid checkpoint, if any, and why newer ones were rejected."""

    folder: Path | None
    manifest: Manifest | None
    rejected: dict[Path, str]


def newest_valid(candidates: Sequence[Path], check: Callable[[Path], Manifest] = check) -> Choice:
    """Find the first of the candidates that `check` accepts.

    With many ranks, all of them call this with rank 0's candidates, and with a `check` that checks each rank's share
    and raises the error of `verdict` on every rank. An UnreadableError ends the search: the mount may come back, and
    resuming from an older checkpoint would give up the newer ones.
    """
    rejected: dict[Path, str] = {}
    for folder in candidates:
        try:
            return Choice(folder=folder, manifest=check(folder), rejected=rejected)
        except UnreadableError:
            raise
        except CheckpointError as error:
            rejected[folder] = str(error)
    return Choice(folder=None, manifest=None, rejected=rejected)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one rank's `check` of its share."""

    rank: int
    host: str
    kind: Literal["valid", "content", "common", "unreadable"]
    """content: a file in its share is wrong; common: every rank that sees the same files must find it"""
    text: str

    @classmethod
    def of(cls, error: CheckpointError | None, rank: int) -> Self:
        """Describe what `check` raised; None if it returned."""
        kind: Literal["valid", "content", "common", "unreadable"] = "valid" if error is None else "common"
        if isinstance(error, UnreadableError):
            kind = "unreadable"
        elif isinstance(error, ContentError):
            kind = "content"
        return cls(rank=rank, host=socket.gethostname(), kind=kind, text=str(error or ""))


def verdict(findings: Sequence[Finding]) -> CheckpointError | None:
    """Return the error that all ranks raise for a checkpoint folder; None for a valid one."""
    unreadable = [it for it in findings if it.kind == "unreadable"]
    common = [it for it in findings if it.kind == "common"]
    if unreadable:
        first = unreadable[0]
        return UnreadableError(f"rank {first.rank} on {first.host}: {first.text}")
    if 0 < len(common) < len(findings):
        first = common[0]
        return UnreadableError(
            f"rank {first.rank} on {first.host}: {first.text}. But other ranks see these files whole: all nodes must "
            "have the filesystem of the run folder mounted; see to it, and start again"
        )
    damaged = [it for it in findings if it.kind != "valid"]
    return CheckpointError(damaged[0].text) if damaged else None


def steps_to_delete(steps: Collection[int], *, keep_last: int, keep_every: int) -> list[int]:
    """Return all steps but the newest `keep_last` and the multiples of `keep_every` (0: no multiples), ascending.

    The newest always stays. After a commit it is the one that was just written, since `begin` refuses newer ones.
    """
    newest_first = sorted(steps, reverse=True)
    return sorted(step for step in newest_first[max(1, keep_last) :] if keep_every == 0 or step % keep_every != 0)


_MAKE_ROOM = "free space, or keep fewer checkpoints (checkpoint.keep_last, checkpoint.keep_every)"


def _remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _MAKE_ROOM
    return "see that the filesystem is mounted and that the run may write there"


def _free_name(path: Path) -> Path:
    """The path, or the first of path.2, path.3, ... that is not taken."""
    number = 2
    target = path
    while target.exists():
        target, number = path.with_name(f"{path.name}.{number}"), number + 1
    return target

"""Files that are whole, or not there under their name, also after a power cut.

Three steps make it so, in this order: the data reach the disk (fsync of the file) before the name does (rename), and
the rename counts as done only when the folder that holds the name has reached the disk too (fsync of the folder).
Without the first, a crash can leave the name on an empty file; without the last, it can bring back the old name.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_a3po.errors import CheckpointError


def write_durably(path: Path, text: str) -> None:
    """Replace the file in one step: a reader, and the run after a crash, finds the old text or the new one."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    _write(unfinished, text)
    os.replace(unfinished, path)
    sync_folder(path.parent)


def create_durably(path: Path, text: str) -> None:
    """The same for a new file, whole or not there. Raises FileExistsError where there is one, also if two come at one
    time."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        _write(unfinished, text)
        os.link(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in the folder (new, renamed, deleted ones) survive a power cut; not those in its subfolders."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network filesystems have no fsync for folders; their servers keep names in order by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """What the system refuses, such as a write to a full disk, becomes a CheckpointError that says what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: could not be written: {error}; {remedy}") from error

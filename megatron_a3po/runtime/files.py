"""Files and folders that appear under their name when they are whole, also after a power cut.

Everything is written beside its place, as `.NAME.unfinished`. Three steps follow, in this order: the data reach the
disk (fsync of the file), the name is given (rename), and the name reaches the disk (fsync of the folder that holds it).
Without the first step, a crash can leave the name on an empty file; without the last one, it can bring back the old
name.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_a3po.errors import CheckpointError


def unfinished_path(path: Path) -> Path:
    """Return where the file or folder `path` is written until `give_name`."""
    return path.parent / f".{path.name}.unfinished"


def give_name(path: Path) -> None:
    """Rename the unfinished file or folder, whose data are on the disk, to `path`, and bring the name to the disk.

    Replaces a file and an empty folder. Raises OSError.
    """
    os.replace(unfinished_path(path), path)
    sync_folder(path.parent)


def write_durably(path: Path, text: str) -> None:
    """Replace the file in one step: a reader, and the run after a crash, finds the old text or the new one."""
    _write(unfinished_path(path), text)
    give_name(path)


def create_durably(path: Path, text: str) -> None:
    """Make a new file in one step. Raises FileExistsError if there is one, also when two processes try at once."""
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


def sync_tree(folder: Path) -> None:
    """Make all files in the folder and below survive a power cut, also what was written through a mapping of them."""
    for parent, _, names in folder.walk():
        for name in names:
            with (parent / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(parent)


def ensure_space(folder: Path, needed_bytes: int, what: str, remedy: str) -> None:
    """Raise CheckpointError if the filesystem of `folder`, which may be still to be made, has too few bytes free.

    `what` and `remedy` begin and end the message. A quota cannot be seen.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{what} needs {_readable(needed_bytes)}, and the filesystem has {_readable(free_bytes)} free; {remedy}"
        )


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Turn an OSError, such as that of a full disk, into a CheckpointError that names `path` and the remedy."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: could not be written: {error}; {remedy}") from error


class FileLock:
    """A lock on a file or folder, from `take` until `release` or the end of the process.

    It is the kernel's (flock), so it ends with its process, however that one ends. Children made by fork share it and
    keep it while they live; started programs do not. On NFS, Linux makes flock a lock of the server, which holds
    between hosts unless the mount says `local_lock`; after the crash of a whole host the server keeps it until the
    lease is over (minutes).
    """

    def __init__(self, path: Path) -> None:
        """Open the folder, or the file, which is made if there is none. Raises OSError."""
        flags = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT
        # A number and no file object: nothing releases the lock because a variable went out of scope.
        self._descriptor: int | None = os.open(path, flags, 0o644)

    def take(self) -> None:
        """Raise BlockingIOError while another process has the lock, and OSError on a filesystem without locks."""
        assert self._descriptor is not None
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Give up the lock, also for forked children. Does nothing the second time."""
        if self._descriptor is not None:
            with suppress(OSError):  # a filesystem without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def read_text(self) -> str:
        """Return what the file says, at most 200 bytes of it."""
        assert self._descriptor is not None
        return os.pread(self._descriptor, 200, 0).decode(errors="replace")

    def write_text(self, text: str) -> None:
        """Replace what the file says. On a full disk the lock holds without its text."""
        assert self._descriptor is not None
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode(), 0)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _readable(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes ({num_bytes / 2**30:,.2f} GiB)"

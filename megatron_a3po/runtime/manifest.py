"""The manifest of a checkpoint folder: which files belong to it, their sizes and their checksums.

Format of `manifest.json`, UTF-8:

    {"format": 1, "step": 20, "facts": {...},
     "files": {"__0_0.distcp": {"size_bytes": 1048576, "sha256": "9f86..."}, ...},
     "sha256": "60303..."}

File names are relative to the folder, with `/`. The last value is the SHA-256 of the rest (as JSON without spaces, keys
sorted), which tells a damaged manifest from a damaged file. `facts` is what a reader needs before
it loads anything, for example the parallel layout.

Many ranks share the work: rank r of n takes every n-th file name in sorted order, from the r-th on.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_a3po.errors import CheckpointError
from megatron_a3po.runtime.files import sync_folder, write_durably

MANIFEST = "manifest.json"
FORMAT = 1
_MAX_PROBLEMS_SHOWN = 3
_NO_SUCH_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class UnreadableError(CheckpointError):
    """The checkpoint cannot be checked: the filesystem fails, or the format is newer."""


class ContentError(CheckpointError):
    """A file of this rank's share has wrong content. Every rank finds all other damage."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksum of a file when its checkpoint was written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of `manifest.json`."""

    step: int
    facts: dict[str, Any]
    files: dict[str, FileRecord]


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint folder; None for any other name."""
    match = re.fullmatch(r"step_([0-9]+)", folder.name)
    # One name per step: step_20 or step_000000020 would be a second one.
    return int(match[1]) if match and folder_name(int(match[1])) == folder.name else None


def describe(folder: Path, rank: int = 0, world_size: int = 1) -> dict[str, FileRecord]:
    """Bring this rank's share of the folder's files to the disk and return their sizes and checksums. Raises OSError.

    All ranks must have closed their files before (barrier). Data of other nodes are then readable: network filesystems
    flush when a file is closed, or when another node reads it.
    """
    return describe_files(folder, file_names(folder)[rank::world_size])


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Do the same for the files `names`, relative to the folder. Raises OSError."""
    return {name: _describe_file(folder / name) for name in names}


def file_names(folder: Path) -> list[str]:
    """Return the relative paths of all files in the folder and below but the manifest, sorted. Raises OSError."""
    # Without `on_error`, a folder that cannot be read would look empty.
    paths = [folder / name for folder, _, names in folder.walk(on_error=_raise) for name in names]
    return sorted({path.relative_to(folder).as_posix() for path in paths} - {MANIFEST})


def write_manifest(folder: Path, step: int, files: Mapping[str, FileRecord], facts: Mapping[str, Any]) -> None:
    """Write the manifest, the last file of a checkpoint, and bring every name in the folder to the disk.

    Raises OSError, and CheckpointError if `files` are not exactly the files in the folder.
    """
    _refuse_incomplete_records(folder, files)
    records = {name: asdict(files[name]) for name in sorted(files)}
    # What JSON makes of the values (keys that are numbers become text, tuples lists) is what a reader computes with.
    body = json.loads(json.dumps({"format": FORMAT, "step": step, "facts": facts, "files": records}, allow_nan=False))
    write_durably(folder / MANIFEST, json.dumps({**body, "sha256": _own_checksum(body)}, indent=1) + "\n")
    for subfolder, _, _ in folder.walk(on_error=_raise):
        sync_folder(subfolder)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder.

    Raises CheckpointError if it is missing, damaged, or of another step, and UnreadableError if its format is newer or
    the filesystem fails.
    """
    try:
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: no such folder; give the folder of a checkpoint (run_dir/checkpoints/step_...)"
            )
        content = json.loads((folder / MANIFEST).read_bytes())
    except _NO_SUCH_FILE:
        raise _unusable(
            folder, f"{MANIFEST} is missing, so this is no checkpoint, or was not written to its end"
        ) from None
    except OSError as error:
        raise unreadable(folder / MANIFEST, error) from error
    except ValueError as error:
        raise _unusable(folder, f"{MANIFEST} is damaged ({error})") from None
    version = content.get("format") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT:
        # Before the checksum, which a newer format may compute in its own way.
        problem = f"{MANIFEST} has format {version}, and this version of megatron_a3po reads up to {FORMAT}"
        raise UnreadableError(f"{folder}: {problem}; resume with the version that wrote it, or a newer one")
    if version is None or content.pop("sha256", None) != _own_checksum(content):
        raise _unusable(folder, f"{MANIFEST} is damaged (its own checksum differs)")
    if step_of(folder) not in (None, content["step"]):
        raise _unusable(
            folder, f"{MANIFEST} is that of step {content['step']}; so the folder was renamed or the file copied"
        )
    files = {name: FileRecord(**record) for name, record in content["files"].items()}
    return Manifest(step=content["step"], facts=content["facts"], files=files)


def check(folder: Path, rank: int = 0, world_size: int = 1) -> Manifest:
    """Compare the folder with its manifest: names and sizes of all files, then the checksums of this rank's share.

    The checkpoint is valid if `check` returns on every rank. Files that are not in the manifest are no error: loading
    does not open them, and people's notes and remains of deleted files on network filesystems (`.nfs...`) get into such
    folders. Raises CheckpointError, which names files and remedy: ContentError for a wrong checksum, UnreadableError if
    the filesystem fails or the format is newer.
    """
    manifest = read_manifest(folder)
    if problems := [text for name, record in manifest.files.items() if (text := _wrong_size(folder, name, record))]:
        raise _unusable(folder, *problems)
    share = sorted(manifest.files)[rank::world_size]
    if problems := [text for name in share if (text := _wrong_checksum(folder, name, manifest.files[name]))]:
        raise ContentError(str(_unusable(folder, *problems)))
    return manifest


def _describe_file(path: Path) -> FileRecord:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return FileRecord(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _refuse_incomplete_records(folder: Path, files: Mapping[str, FileRecord]) -> None:
    present = file_names(folder)
    without_record, without_file = sorted(set(present) - set(files)), sorted(set(files) - set(present))
    if not present or without_record or without_file:
        raise CheckpointError(
            f"{folder}: files that no rank described: {without_record or 'none'}; described, but not there: "
            f"{without_file or 'none'}; files in all: {len(present)}. Do all ranks see the same files? The run folder "
            "must be on a filesystem that all nodes share"
        )
    for name, record in files.items():
        if problem := _wrong_size(folder, name, record):
            raise CheckpointError(f"{folder}: written to while the checkpoint was being described: {problem}")


def _wrong_size(folder: Path, name: str, record: FileRecord) -> str | None:
    try:
        size_bytes = (folder / name).stat().st_size
    except _NO_SUCH_FILE:
        return f"{name} is missing"
    except OSError as error:
        raise unreadable(folder / name, error) from error
    if size_bytes != record.size_bytes:
        return f"{name} has {size_bytes:,} bytes instead of {record.size_bytes:,}"
    return None


def _wrong_checksum(folder: Path, name: str, record: FileRecord) -> str | None:
    try:
        with (folder / name).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(folder / name, error) from error
    if sha256 != record.sha256:
        return (
            f"{name} has other content than was written (SHA-256 {sha256[:12]}... instead of {record.sha256[:12]}...)"
        )
    return None


def _own_checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _unusable(folder: Path, *problems: str) -> CheckpointError:
    more = len(problems) - _MAX_PROBLEMS_SHOWN
    shown = "; ".join(problems[:_MAX_PROBLEMS_SHOWN]) + (f"; and {more} files more" if more > 0 else "")
    return CheckpointError(f"{folder}: {shown}; this checkpoint cannot be used: resume from another one, or restore it")


def unreadable(path: Path, error: OSError) -> UnreadableError:
    """Return the error for a path that the filesystem cannot read."""
    return UnreadableError(
        f"{path}: cannot be read ({error}); another checkpoint would not help: see that the "
        "filesystem is mounted and readable on every node, and start again"
    )


def _raise(error: OSError) -> None:
    raise error

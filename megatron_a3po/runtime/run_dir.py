"""The folder of one run: nothing of another run in it, one run at a time, and known to every rank."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from megatron_a3po.errors import ConfigError
from megatron_a3po.runtime.files import create_durably, write_durably
from megatron_a3po.runtime.logging import logger

CONFIG_FILE = "config.resolved.yaml"
METRICS_FILE = "metrics.jsonl"
MAY_CHANGE = (
    *("run_dir", "resume", "device", "num_steps", "parallel.*", "checkpoint.*", "evaluation.*", "publish.*"),
    *("actor.microbatch_tokens", "actor.oversized", "actor.output_layer", "actor.activation_recompute"),
    *("actor.collective_timeout_seconds", "rollout.*server*", "rollout.key_file", "rollout.*timeout*"),
    *("rollout.max_concurrent_groups", "reward.timeout_seconds", "reward.max_workers", "reward.worker_memory_bytes"),
    "reward.max_failed_share",
)
"""Keys that a resumed run may have changed: where and how fast it runs and what it reports, not what it learns."""


class FolderLock:
    """Holds a file of the folder until `release`, or else until the process has ended."""

    def __init__(self, descriptor: int) -> None:
        # A number and no file object: nothing releases the lock because a variable went out of scope.
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # a filesystem without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also for forked children, which share it
            os.close(self._descriptor)
            self._descriptor = None


def lock_run_dir(run_dir: Path) -> FolderLock:
    """Take the folder for this process. Raises ConfigError while another one has it."""
    return lock_folder(run_dir, "run_dir", "lock")


def lock_folder(folder: Path, key: str, file_name: str) -> FolderLock:
    """Take the folder, of which `key` of the configuration tells, for this process; `file_name` in it is the lock.

    Raises ConfigError while another process has it, and where it cannot be locked.

    The lock is the kernel's (flock), so it ends with its process, however that one ends; the file stays, and what it
    says (`host NAME, process ID`) is for the message only. Children made by fork share the lock and keep it while they
    live; started programs do not. On NFS, Linux makes flock a lock of the server, which holds between hosts unless the
    mount says `local_lock`; after the crash of a whole host the server keeps it until the lease is over (minutes). On
    a filesystem without locks the run goes on with a warning.
    """
    try:
        descriptor = os.open(folder / file_name, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"{key} = {folder}: cannot be locked ({error}); give another one (`{key}=...`)") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "its process is not known"
        os.close(descriptor)
        raise ConfigError(
            f"{key} = {folder}: a run that is still alive has this folder ({holder}); wait for its end, end it, or "
            f"give another folder (`{key}=...`)"
        ) from None
    except OSError as error:
        logger.warning("%s: no lock on this filesystem (%s): start no second run on this folder", folder, error)
    with suppress(OSError):  # on a full disk the lock holds without its text
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"host {socket.gethostname()}, process {os.getpid()}\n".encode(), 0)
    return FolderLock(descriptor)


def refuse_used_run_dir(run_dir: Path) -> None:
    """Raises ConfigError when a run left its `config.resolved.yaml` in the folder."""
    if holds_run(run_dir):
        raise ConfigError(
            f"run_dir = {run_dir}: there is a run in this folder; continue it (`resume=auto`), give another folder "
            "(`run_dir=...`) or remove it"
        )


def holds_run(run_dir: Path) -> bool:
    return (run_dir / CONFIG_FILE).exists()


def claim_run_dir(run_dir: Path, resolved_config: str, *, resume: bool = False) -> FolderLock:
    """Lock the folder and store the configuration in it as `config.resolved.yaml`. For rank 0.

    Without `resume` the folder must not hold a run. With it, a run that is there must have been the same but for the
    keys of MAY_CHANGE; a folder without a run is taken as it is. Raises ConfigError, which names every other key.
    """
    make_log_folder(run_dir)
    lock = lock_run_dir(run_dir)
    try:
        if resume and holds_run(run_dir):
            what = f"run_dir = {run_dir}: the run in this folder"
            refuse_other_config(run_dir / CONFIG_FILE, resolved_config, what)
            write_durably(run_dir / CONFIG_FILE, resolved_config)
        else:
            refuse_used_run_dir(run_dir)
            # Of two runs at one time the second fails here also where there are no locks.
            create_durably(run_dir / CONFIG_FILE, resolved_config)
    except OSError as error:
        lock.release()
        raise ConfigError(f"run_dir = {run_dir}: {error}; give another one (`run_dir=...`)") from None
    except ConfigError:
        lock.release()
        raise
    return lock


def make_log_folder(run_dir: Path) -> Path:
    """The folder of everything that the processes of a run and their libraries print. Raises ConfigError."""
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run_dir = {run_dir}: cannot be created ({error}); give another one (`run_dir=...`)"
        ) from None
    return run_dir / "logs"


def truncate_metrics(run_dir: Path, last_step: int) -> int:
    """Keep the rows of `metrics.jsonl` up to the resumed step, so that the resumed run has each step once.

    Returns how many rows went. A last line torn by the kill goes too; the other lines stay as they are, byte for byte,
    and the file is replaced in one step. Raises ConfigError for a broken line before the last.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines()
    kept = [line.decode() for number, line in enumerate(lines, 1) if _is_kept(path, number, lines, last_step)]
    write_durably(path, "".join(f"{line}\n" for line in kept))
    return len(lines) - len(kept)


def _is_kept(path: Path, number: int, lines: list[bytes], last_step: int) -> bool:
    try:
        return bool(json.loads(lines[number - 1])["step"] <= last_step)
    except (ValueError, KeyError, TypeError) as error:
        if number == len(lines):
            return False
        raise ConfigError(f"{path}: line {number} is broken ({error}); repair or remove the line to resume") from None


def refuse_other_config(file: Path, resolved_config: str, what: str) -> None:
    """Raises ConfigError with every key that must not change and did since `file` was written; logs the other changes.

    `what` begins the message: the run that was started with the former settings.
    """
    stored = _read_stored(file)
    changes = differing_keys(stored, yaml.safe_load(resolved_config))
    allowed = {key: change for key, change in changes.items() if any(fnmatchcase(key, name) for name in MAY_CHANGE)}
    refused = [f"\n  {key}: {change}" for key, change in changes.items() if key not in allowed]
    if refused:
        raise ConfigError(
            f"{what} was started with other settings, with which it cannot be resumed:{''.join(refused)}\n"
            "Give these the former values, or start a new run (`run_dir=...`)"
        )
    for key, change in allowed.items():
        logger.info("resuming with a changed setting, %s: %s", key, change)


def _read_stored(path: Path) -> dict[str, Any]:
    try:
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); restore it, or start a new run (`run_dir=...`)") from None
    if not isinstance(stored, dict):
        raise ConfigError(f"{path}: holds no configuration; restore it, or start a new run (`run_dir=...`)")
    return stored


def differing_keys(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """The dotted keys whose values differ, in order, with both values as text."""
    old, new = dict(_flatten(before)), dict(_flatten(now))
    missing = object()
    return {
        key: f"{_shown(old, key)} before, {_shown(new, key)} now"
        for key in dict.fromkeys([*old, *new])
        if old.get(key, missing) != new.get(key, missing)
    }


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not set"

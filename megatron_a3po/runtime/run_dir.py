"""The folder of one run: it holds nothing of another run, and one process at a time has it."""

import json
import os
import socket
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from megatron_a3po.errors import ConfigError
from megatron_a3po.runtime.files import FileLock, create_durably, write_durably
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
"""Keys that may differ in a resumed run: where and how fast it runs and what it reports, not what it learns"""


def lock_run_dir(run_dir: Path) -> FileLock:
    """Take the run folder for this process. Raises ConfigError while another one has it."""
    return lock_folder(run_dir, "run_dir", "lock")


def lock_folder(folder: Path, key: str, file_name: str) -> FileLock:
    """Take the folder that `key` of the configuration names for this process; the file `file_name` in it is the lock.

    The file stays; it says `host NAME, process ID`, for the message only. On a filesystem without locks the run goes on
    with a warning. Raises ConfigError while another process has the folder, and if it cannot be locked.
    """
    try:
        lock = FileLock(folder / file_name)
    except OSError as error:
        raise ConfigError(f"{key} = {folder}: cannot be locked ({error}); give another one (`{key}=...`)") from None
    try:
        lock.take()
    except BlockingIOError:
        holder = lock.read_text().strip() or "its process is not known"
        lock.release()
        raise ConfigError(
            f"{key} = {folder}: a run that is still alive has this folder ({holder}); wait for its end, end it, or "
            f"give another folder (`{key}=...`)"
        ) from None
    except OSError as error:
        logger.warning("%s: no lock on this filesystem (%s): start no second run on this folder", folder, error)
    lock.write_text(f"host {socket.gethostname()}, process {os.getpid()}\n")
    return lock


def refuse_used_run_dir(run_dir: Path) -> None:
    """Raise ConfigError if the folder holds a run."""
    if holds_run(run_dir):
        raise ConfigError(
            f"run_dir = {run_dir}: there is a run in this folder; continue it (`resume=auto`), give another folder "
            "(`run_dir=...`) or remove it"
        )


def holds_run(run_dir: Path) -> bool:
    """Tell whether a run left its `config.resolved.yaml` in the folder."""
    return (run_dir / CONFIG_FILE).exists()


def claim_run_dir(run_dir: Path, resolved_config: str, *, resume: bool = False) -> FileLock:
    """Lock the folder and store the configuration in it as `config.resolved.yaml`. For rank 0.

    Without `resume`, the folder must not hold a run. With `resume`, the configuration of a run that is there may differ
    in the keys of MAY_CHANGE. Raises ConfigError, which names every other key that differs.
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
            # If two runs start at once, the second fails here also on a filesystem without locks.
            create_durably(run_dir / CONFIG_FILE, resolved_config)
    except OSError as error:
        lock.release()
        raise ConfigError(f"run_dir = {run_dir}: {error}; give another one (`run_dir=...`)") from None
    except ConfigError:
        lock.release()
        raise
    return lock


def make_log_folder(run_dir: Path) -> Path:
    """Make and return the folder for everything that the processes of a run print. Raises ConfigError."""
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run_dir = {run_dir}: cannot be created ({error}); give another one (`run_dir=...`)"
        ) from None
    return run_dir / "logs"


def truncate_metrics(run_dir: Path, last_step: int) -> int:
    """Remove the rows of `metrics.jsonl` after the resumed step, so that the resumed run has each step once.

    Returns the number of rows that were removed, with a last line torn by a kill. The other lines stay byte for byte,
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
    """Raise ConfigError with every key that must not change and differs from `file`; log the other changes.

    `what` begins the message: the run that was started with the earlier settings.
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
    """Return the dotted keys whose values differ, in order, each with both values as text."""
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

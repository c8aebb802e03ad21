"""Rollout machines that follow the published versions, and the run that waits for them.

Each says in FOLDER/followers/HOST which folder it holds. One that does not come to hold a version in time is forgotten,
until it holds one: a machine that is gone costs one wait. Its servers then refuse, since they miss the folder.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_a3po.errors import PublishError
from megatron_a3po.runtime.durable import write_durably
from megatron_a3po.runtime.logging import logger
from megatron_a3po.weights.delta_folder import PUBLISHED, Published, lock_local, make_local_folder, read_published

_FOLLOWERS = "followers"
_POLL_SECONDS = 0.1


def follow(folder: Path, local: Path, host: str, keep_on: Callable[[], bool] = lambda: True) -> None:
    """Make every version that is published in `folder` a folder below `local`. Raises ConfigError while another process
    does that there, PublishError and OSError."""
    lock = lock_local(local)
    note = folder / _FOLLOWERS / host
    note.parent.mkdir(parents=True, exist_ok=True)
    held = ""
    try:
        while keep_on():
            published = read_published(folder / PUBLISHED)
            if published is not None and published.folder_name != held:
                try:
                    held = make_local_folder(folder, local, published).name
                except OSError:
                    # The run may have gone on to the next version, and removed files of this one.
                    if read_published(folder / PUBLISHED) == published:
                        raise
                    continue
                logger.info("holds %s", held)
            if _read(note) != held:
                write_durably(note, held)
            time.sleep(_POLL_SECONDS)
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def wait_for_followers(
    folder: Path, published: Published, timeout_seconds: float, look: Callable[[], None] = lambda: None
) -> None:
    """Until all hold the version, or time is over. look: is called meanwhile. Raises PublishError without a follower,
    and what `look` raises."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        look()
        held = {path: _read(path) for path in (folder / _FOLLOWERS).glob("[!.]*")}
        late = [path for path in held if held[path] != published.folder_name]
        if held and not late:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    if not held:
        raise PublishError(
            f"no machine follows {folder} within {timeout_seconds:g} s; run tools/apply_weight_delta.py on every "
            "machine with rollout servers"
        )
    for path in late:
        logger.warning(
            "%s did not hold weight version %d within %g s; is tools/apply_weight_delta.py running there?",
            path.name,
            published.version,
            timeout_seconds,
        )
        path.unlink(missing_ok=True)


def _read(path: Path) -> str | None:
    with suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8")
    return None

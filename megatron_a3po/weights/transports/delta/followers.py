"""Rollout machines that follow the published versions, and the run that waits for them.

Each says in FOLDER/followers/HOST which folder it holds. One that does not come to hold a version in time is forgotten,
until it holds one: a machine that is gone costs one wait. Its servers then refuse, since they miss the folder.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_a3po.errors import PublishError
from megatron_a3po.runtime.files import write_durably
from megatron_a3po.runtime.logging import logger
from megatron_a3po.weights.transports.delta.folder import (
    PUBLISHED,
    Published,
    lock_local,
    make_local_folder,
    read_published,
)

_FOLLOWERS = "followers"
_POLL_SECONDS = 0.1
_RETRY_SECONDS = 1.0
"""After the first failure of a version; twice as long after each further one"""
_MAX_RETRY_SECONDS = 30.0


def follow(folder: Path, local: Path, host: str, keep_on: Callable[[], bool] = lambda: True) -> None:
    """Make every version that is published in `folder` a folder below `local`. What fails is logged and tried again.
    Raises ConfigError while another process does that there, and OSError where `local` cannot be made."""
    lock = lock_local(local)
    machine = _Machine(folder, local, folder / _FOLLOWERS / host)
    try:
        while keep_on():
            machine.look()
            time.sleep(_POLL_SECONDS)
    finally:
        with suppress(OSError):
            machine.note.unlink(missing_ok=True)
        lock.release()


@dataclass
class _Machine:
    """What follows, and its failures since it last held a version."""

    folder: Path
    local: Path
    note: Path
    _held: str = ""
    _failed: Published | None = None
    _pause_seconds: float = _RETRY_SECONDS
    _next_time: float = 0.0
    _told: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Hold what is published, unless that has failed a short while ago."""
        published = read_published(self.folder / PUBLISHED)
        if published == self._failed and time.monotonic() < self._next_time:
            return
        try:
            self._hold(published)
        except (OSError, PublishError) as error:
            # The run may have gone on to the next version, and removed files of this one.
            if read_published(self.folder / PUBLISHED) == published:
                self._fail(published, error)
        else:
            self._failed, self._pause_seconds = None, _RETRY_SECONDS
            self._told.clear()

    def _hold(self, published: Published | None) -> None:
        if published is not None and published.folder_name != self._held:
            self._held = ""  # the folder becomes the new one, or nothing
            self._held = make_local_folder(self.folder, self.local, published).name
            logger.info("holds %s", self._held)
        if _read(self.note) != self._held:
            self.note.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self.note, self._held)

    def _fail(self, published: Published | None, error: OSError | PublishError) -> None:
        remedy = "" if isinstance(error, PublishError) else f"; see to {self.folder}, or to the room in {self.local}"
        if str(error) not in self._told:
            self._told.add(str(error))
            logger.error("%s%s; this is tried again until it succeeds", error, remedy)
        if published != self._failed:
            self._failed, self._pause_seconds = published, _RETRY_SECONDS
        self._next_time = time.monotonic() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, _MAX_RETRY_SECONDS)


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

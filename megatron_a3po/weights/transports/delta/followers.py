"""Rollout machines that follow the published versions, and the run that waits for them.

Each machine writes to FOLDER/followers/HOST which folder it holds. The run forgets a machine that does not hold a
version in time, until it holds one again: a machine that is gone costs one wait. Its servers then refuse the version,
since they miss the folder.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_a3po.errors import PublishError
from megatron_a3po.runtime.files import write_durably
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.waiting import wait_until
from megatron_a3po.weights.transports.delta.folder import (
    PUBLISHED,
    Published,
    lock_local,
    make_local_folder,
    read_published,
)
from megatron_a3po.weights.wait_times import WaitTimes

_FOLLOWERS = "followers"


def follow(
    folder: Path, local: Path, host: str, keep_on: Callable[[], bool] = lambda: True, times: WaitTimes | None = None
) -> None:
    """Turn every version that is published in `folder` into a folder below `local`, while `keep_on` returns True.

    Logs failures and retries. Raises ConfigError while another process follows there, and OSError if `local` cannot be
    made.
    """
    times = times or WaitTimes()
    lock = lock_local(local)
    machine = _Machine(folder, local, folder / _FOLLOWERS / host, times)
    try:
        while keep_on():
            machine.look()
            times.clock.sleep(times.follower_look_seconds)
    finally:
        with suppress(OSError):
            machine.note.unlink(missing_ok=True)
        lock.release()


@dataclass
class _Machine:
    """The following machine, and its failures since it last held a version."""

    folder: Path
    local: Path
    note: Path
    times: WaitTimes
    _held: str = ""
    _failed: Published | None = None
    _pause_seconds: float = 0.0
    _next_time: float = 0.0
    _told: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Hold the published version, unless that failed a short while ago."""
        published = read_published(self.folder / PUBLISHED)
        if published == self._failed and self.times.clock.now() < self._next_time:
            return
        try:
            self._hold(published)
        except (OSError, PublishError) as error:
            # The run may have gone on to the next version, and removed files of this one.
            if read_published(self.folder / PUBLISHED) == published:
                self._fail(published, error)
        else:
            self._failed, self._pause_seconds = None, 0.0
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
        remedy = "" if isinstance(error, PublishError) else f"; check {self.folder} and the free space in {self.local}"
        if str(error) not in self._told:
            self._told.add(str(error))
            logger.error("%s%s; retrying until it succeeds", error, remedy)
        if published != self._failed:
            self._failed, self._pause_seconds = published, 0.0
        self._pause_seconds = min(2 * self._pause_seconds, self.times.max_retry_seconds) or self.times.retry_seconds
        self._next_time = self.times.clock.now() + self._pause_seconds


def wait_for_followers(
    folder: Path,
    published: Published,
    timeout_seconds: float,
    look: Callable[[], None] = lambda: None,
    times: WaitTimes | None = None,
) -> None:
    """Wait until all followers hold the version, and forget those that do not after `timeout_seconds`.

    `look` is called meanwhile. Raises PublishError when there is no follower, and what `look` raises.
    """
    times = times or WaitTimes()
    held: dict[Path, str | None] = {}

    def all_hold() -> bool | None:
        look()
        held.clear()
        held.update({path: _read(path) for path in (folder / _FOLLOWERS).glob("[!.]*")})
        return True if held and all(name == published.folder_name for name in held.values()) else None

    try:
        wait_until(all_hold, timeout_seconds, look_seconds=times.follower_look_seconds, clock=times.clock)
    except TimeoutError:
        if not held:
            raise PublishError(
                f"no machine follows {folder} within {timeout_seconds:g} s; run tools/apply_weight_delta.py on every "
                "machine with rollout servers"
            ) from None
    for path, name in held.items():
        if name != published.folder_name:
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

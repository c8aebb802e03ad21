"""What rank 0 and the senders tell each other during one publication, through the store that the ranks have met in.

No collective: whoever fails, fails alone, and the others learn of it while they wait for something else.
"""

import math
import time

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megatron_a3po.errors import PublishError

_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.00005, 0.001
"""The second look comes soon, further ones ever later: what does not come at once takes long."""
_STOP = "stop"


class Stopped(PublishError):
    """Another thread or rank has failed first."""


class StoreMessages:
    """For one thread of one rank."""

    def __init__(self, store: dist.Store, name: str) -> None:
        """`store`: the thread's own, since a client of a store serves one caller at a time. `name`: of the publication,
        the same on all ranks and not used before."""
        self._store = c10d.PrefixStore(name, store)
        self._own: list[str] = []

    def tell(self, key: str, value: str = "") -> None:
        self._own.append(key)
        self._store.set(key, value)

    def wait_for(self, key: str, timeout_seconds: float = math.inf, what: str = "") -> str:
        """The value that was told with `key`. Raises Stopped when something else has failed, and PublishError at the
        timeout, which says `what` failed."""
        deadline, pause = time.monotonic() + timeout_seconds, _FIRST_POLL_SECONDS
        while not self._store.check([key]):
            self.raise_if_stopped()
            if time.monotonic() > deadline:
                raise PublishError(f"{what}: not within {timeout_seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS)
        return self._store.get(key).decode()

    def stop(self, reason: str) -> None:
        """Tell everybody that the publication has failed. The first reason is kept."""
        self._own.append(_STOP)
        if not self._store.check([_STOP]):
            self._store.compare_set(_STOP, "", reason)

    def stop_reason(self) -> str | None:
        """Why the publication has failed; None while it has not."""
        return self._store.get(_STOP).decode() if self._store.check([_STOP]) else None

    def raise_if_stopped(self) -> None:
        if (reason := self.stop_reason()) is not None:
            raise Stopped(reason)

    def forget(self) -> None:
        """Remove what this thread has told. When every rank knows how the publication ended, and not before."""
        for key in self._own:
            self._store.delete_key(key)
        self._own.clear()

"""Messages between rank 0 and the sending ranks during one publication, through the store that the ranks share.

No collective is needed: a rank that fails can say so on its own, and the others learn of it while they wait for
something else.
"""

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megatron_a3po.errors import PublishError
from megatron_a3po.runtime.waiting import wait_until
from megatron_a3po.weights.wait_times import WaitTimes

_STOP = "stop"


class Stopped(PublishError):
    """Another thread or rank failed first."""


class StoreMessages:
    """The messages of one publication, for one thread of one rank."""

    def __init__(self, store: dist.Store, name: str, times: WaitTimes | None = None) -> None:
        """store: the thread's own, since a client of a store serves one caller at a time. name: of the publication,
        the same on all ranks and never used before."""
        self._store = c10d.PrefixStore(name, store)
        self._times = times or WaitTimes()
        self._own: list[str] = []

    def tell(self, key: str, value: str = "") -> None:
        """Publish a value under a key."""
        self._own.append(key)
        self._store.set(key, value)

    def wait_for(self, key: str, timeout_seconds: float | None = None, what: str = "") -> str:
        """Return the value that a rank told under `key`, as soon as it does.

        Raises Stopped when the publication has failed elsewhere, and PublishError after the timeout (None: never),
        which says that `what` failed.
        """

        def look() -> str | None:
            if self._store.check([key]):
                return self._store.get(key).decode()
            self.raise_if_stopped()
            return None

        try:
            return wait_until(
                look, timeout_seconds, look_seconds=self._times.message_look_seconds, clock=self._times.clock
            )
        except TimeoutError as error:
            raise PublishError(f"{what}: {error}") from None

    def stop(self, reason: str) -> None:
        """Tell all ranks that the publication has failed. The first reason is kept."""
        self._own.append(_STOP)
        if not self._store.check([_STOP]):
            self._store.compare_set(_STOP, "", reason)

    def stop_reason(self) -> str | None:
        """Return why the publication has failed; None while it has not."""
        return self._store.get(_STOP).decode() if self._store.check([_STOP]) else None

    def raise_if_stopped(self) -> None:
        """Raise Stopped if the publication has failed."""
        if (reason := self.stop_reason()) is not None:
            raise Stopped(reason)

    def forget(self) -> None:
        """Remove what this thread has told. Call it only after every rank knows how the publication ended."""
        for key in self._own:
            self._store.delete_key(key)
        self._own.clear()

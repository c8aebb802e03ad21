"""One run at a time publishes to a rollout server: who that is, is kept by the server itself.

SGLang's sessions are meant for conversations. Their names are unique at a server, and they end by themselves some time
after they were opened, which is what a lease needs: it outlives no run by long, and runs need not reach each other.
"""

import asyncio
from contextlib import suppress

from megatron_a3po.errors import RolloutError
from megatron_a3po.rollout.client import RequestRefused, SGLangClient

_SESSIONS = ("megatron_a3po_publisher_0", "megatron_a3po_publisher_1")
LEASE_SECONDS = 10.0
"""A run that was killed has a server for so long."""
RETRY_SECONDS = 1.0
_CALL_SECONDS = 5.0


class Lease:
    """The right to publish to one server. A session cannot be prolonged, so there are two: the holder opens the one
    before the other ends, and nobody else finds both free."""

    def __init__(self, client: SGLangClient) -> None:
        self._client = client
        self._number = 0
        """of the session that was opened last"""
        self._keeper: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        return self._keeper is not None and not self._keeper.done()

    @property
    def is_lost(self) -> bool:
        """Somebody else has it, after this run had it."""
        return self._keeper is not None and self._keeper.done()

    async def take(self) -> bool:
        """Whether this run has it from now on. Raises RolloutError without an answer."""
        if self.is_held:
            return True
        first, second = _SESSIONS
        if not await self._try_to_open(first):
            return False
        is_free = await self._try_to_open(second)
        await self._end(second if is_free else first)
        if is_free:
            self._number = 0
            self._keeper = asyncio.create_task(self._keep())
        return is_free

    async def release(self) -> None:
        """Raises nothing."""
        held = self.is_held
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None
        for name in _SESSIONS if held else ():
            with suppress(RolloutError):
                await self._end(name)

    async def _keep(self) -> None:
        """Ends when the other session is refused for longer than one lasts that this run has opened."""
        pause, num_refused = LEASE_SECONDS / 2, 0
        while num_refused * RETRY_SECONDS < LEASE_SECONDS + 2 * RETRY_SECONDS:
            await asyncio.sleep(pause)
            pause = RETRY_SECONDS
            with suppress(RolloutError):  # whether a server is gone is looked at elsewhere
                if await self._try_to_open(_SESSIONS[1 - self._number]):
                    self._number, num_refused, pause = 1 - self._number, 0, LEASE_SECONDS / 2
                else:
                    num_refused += 1

    async def _try_to_open(self, name: str) -> bool:
        body = {"session_id": name, "timeout": LEASE_SECONDS, "capacity_of_str_len": 0}
        try:
            await self._client.post("/open_session", body, _CALL_SECONDS)
        except RequestRefused:
            return False
        return True

    async def _end(self, name: str) -> None:
        await self._client.post("/close_session", {"session_id": name}, _CALL_SECONDS)

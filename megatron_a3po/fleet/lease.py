"""One run at a time publishes to a rollout server: who that is, is kept by the server itself.

SGLang's sessions are meant for conversations. Their names are unique at a server, and they end by themselves some time
after they were opened, which is what a lease needs: it outlives no run by long, and runs need not reach each other.
"""

import asyncio
import math
import time
from collections.abc import Awaitable
from contextlib import suppress

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.client import RequestRefused, SGLangClient

_SESSIONS = ("megatron_a3po_publisher_0", "megatron_a3po_publisher_1")
LEASE_SECONDS = 10.0
"""A run that was killed has a server for so long."""
RETRY_SECONDS = 1.0
_CALL_SECONDS = 5.0
_LATE_SECONDS = 120.0
"""A later answer of a busy scheduler is not waited for: the machine behind the connection may be gone."""


class Lease:
    """The right to publish to one server. A session cannot be prolonged, so there are two: the holder opens the one
    before the other ends, and nobody else finds both free."""

    def __init__(self, client: SGLangClient) -> None:
        self._client = client
        self._number = 0
        """of the session that was opened last"""
        self._opened = -math.inf
        """when, by this process's clock; the server's time runs from a little later on"""
        self._keeper: asyncio.Task[None] | None = None
        self._attempts = asyncio.Lock()
        self._calls: dict[str, asyncio.Task[float]] = {}
        """By name of the session: calls to open it whose answers nobody has seen yet"""
        self.last_answer = -math.inf
        """By time.monotonic(): when the server's scheduler has last granted or refused anything to this lease"""

    @property
    def is_held(self) -> bool:
        return self._keeper is not None and not self._keeper.done() and not self._is_over

    @property
    def has_run_out(self) -> bool:
        """This run had it, and has stood still, or had no answer, for so long that somebody else may have it."""
        return self._keeper is not None and not self.is_held

    @property
    def is_lost(self) -> bool:
        """Somebody else has it, after this run had it."""
        return self._keeper is not None and self._keeper.done()

    @property
    def _is_over(self) -> bool:
        return time.monotonic() - self._opened >= LEASE_SECONDS

    async def take(self) -> bool:
        """Whether this run has it from now on. Raises RolloutError without an answer."""
        async with self._attempts:
            if self.is_held:
                return True
            if not await self._or_refused(self._take_anew()):
                return False
            if self._keeper is not None:
                self._keeper.cancel()
            self._keeper = asyncio.create_task(self._keep())
            return True

    async def release(self) -> None:
        """Raises nothing."""
        held = self.is_held
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None
        for call in self._calls.values():
            call.cancel()
        for name in _SESSIONS if held else ():
            with suppress(RolloutError):
                await self._end(name)

    async def _keep(self) -> None:
        """Ends when a session is refused for longer than one lasts that this run has opened."""
        pause, num_refused = LEASE_SECONDS / 2, 0
        # SGLang looks once a second for sessions that have ended.
        while num_refused * RETRY_SECONDS < LEASE_SECONDS + 4 * RETRY_SECONDS:
            await asyncio.sleep(pause)
            pause = RETRY_SECONDS
            try:
                async with self._attempts:
                    is_prolonged = await self._or_refused(self._take_anew() if self._is_over else self._prolong())
            except RolloutError:
                # Whether a server is gone is looked at elsewhere. What a busy scheduler was asked for, it may open
                # later, and then it refuses this run for as long as a session lasts.
                num_refused = 0
                continue
            if is_prolonged:
                num_refused, pause = 0, LEASE_SECONDS / 2
            else:
                num_refused += 1

    async def _take_anew(self) -> bool:
        before = time.monotonic()
        first, second = _SESSIONS
        if not await self._try_to_open(first):
            return False
        is_free = False
        try:
            is_free = await self._try_to_open(second)
        finally:
            await self._end(second if is_free else first)
        if is_free:
            self._number, self._opened = 0, before
        return is_free and not self._is_over

    async def _prolong(self) -> bool:
        before = time.monotonic()
        other = 1 - self._number
        if not await self._try_to_open(_SESSIONS[other]):
            return False
        if self._is_over:
            # The call may have arrived late: somebody else, who needs both but once, may have the other session.
            await self._end(_SESSIONS[other])
            return False
        self._number, self._opened = other, before
        return True

    async def _or_refused(self, attempt: Awaitable[bool]) -> bool:
        """Whether it succeeded. Raises RolloutError without an answer of the scheduler.

        SGLang's front end may have refused by itself, for a call of somebody else that waits for the busy scheduler, or
        for one of this run whose connection was lost.
        """
        if await attempt:
            return True
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                await self._client.server_info()
        except TimeoutError:
            message = f"{self._client.url}/server_info gave no answer within {_CALL_SECONDS:g} s"
            raise RolloutError(message) from None
        self.last_answer = time.monotonic()
        return False

    async def _try_to_open(self, name: str) -> bool:
        """Raises RolloutError without an answer."""
        if name in self._calls:
            opened = await self._answer(name)
            if opened is not None and time.monotonic() - opened < LEASE_SECONDS / 2:
                await self._end(name)  # this run has opened it, and cannot tell for how long it has it
        self._calls[name] = call = asyncio.create_task(self._open(name))
        call.add_done_callback(_read)
        return await self._answer(name) is not None

    async def _open(self, name: str) -> float:
        # Until the scheduler has answered, SGLang's front end refuses every other call for this name.
        body = {"session_id": name, "timeout": LEASE_SECONDS, "capacity_of_str_len": 0}
        await self._client.post("/open_session", body, _LATE_SECONDS)
        return time.monotonic()

    async def _answer(self, name: str) -> float | None:
        """To the last call for it: when it came, if it is open; None if not. Raises RolloutError without one."""
        call = self._calls[name]
        if not (await asyncio.wait({call}, timeout=_CALL_SECONDS))[0]:
            raise RolloutError(f"{self._client.url}/open_session gave no answer within {_CALL_SECONDS:g} s")
        del self._calls[name]
        try:
            opened = call.result()
        except RequestRefused:
            return None
        self.last_answer = opened
        return opened

    async def _end(self, name: str) -> None:
        await self._client.post("/close_session", {"session_id": name}, _CALL_SECONDS)


def _read(call: asyncio.Task[float]) -> None:
    """Of a call whose answer nobody waits for, a failure is none."""
    if not call.cancelled():
        call.exception()

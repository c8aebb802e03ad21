"""The right to publish to a rollout server, which one run has at a time and the server itself keeps.

SGLang's sessions are meant for conversations. Their names are unique at a server, and they end by themselves some time
after they were opened. That is what a lease needs: it does not outlive a run for long, and runs need not reach each
other.
"""

import asyncio
import math
import time
from collections.abc import Awaitable
from contextlib import suppress

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.client import RequestRefused, SGLangClient
from megatron_a3po.fleet.timings import DEFAULT_LEASE_TIMINGS, LeaseTimings

_SESSIONS = ("megatron_a3po_publisher_0", "megatron_a3po_publisher_1")


class Lease:
    """The right of this run to publish to one server.

    A session cannot be prolonged, so there are two: the holder opens one before the other ends, and nobody else finds
    both free.
    """

    def __init__(self, client: SGLangClient, timings: LeaseTimings = DEFAULT_LEASE_TIMINGS) -> None:
        self.timings = timings
        self._client = client
        self._number = 0
        """The session that was opened last"""
        self._opened = -math.inf
        """When it was opened, by this process's clock; the server's time runs from a little later on"""
        self._renewal: asyncio.Task[None] | None = None
        self._attempts = asyncio.Lock()
        self._calls: dict[str, asyncio.Task[float]] = {}
        """Calls to open a session whose answers nobody has seen yet, by its name"""
        self.last_answer = -math.inf
        """When the server's scheduler last granted or refused anything to this lease, by time.monotonic()"""

    @property
    def is_held(self) -> bool:
        """Whether this run has the server."""
        return self._renewal is not None and not self._renewal.done() and not self._is_over

    @property
    def has_run_out(self) -> bool:
        """Whether this run had the server and did not renew the lease in time, so that another run may have it."""
        return self._renewal is not None and not self.is_held

    @property
    def is_lost(self) -> bool:
        """Whether this run had the server and another run has it now."""
        return self._renewal is not None and self._renewal.done()

    @property
    def _is_over(self) -> bool:
        return time.monotonic() - self._opened >= self.timings.lease_seconds

    async def take(self) -> bool:
        """Return whether this run has the server from now on. Raises RolloutError without an answer."""
        async with self._attempts:
            if self.is_held:
                return True
            if not await self._or_refused(self._take_anew()):
                return False
            if self._renewal is not None:
                self._renewal.cancel()
            self._renewal = asyncio.create_task(self._renew())
            return True

    async def release(self) -> None:
        """Give the server back. Raises nothing."""
        held = self.is_held
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
        for call in self._calls.values():
            call.cancel()
        for name in _SESSIONS if held else ():
            with suppress(RolloutError):
                await self._end(name)

    async def _renew(self) -> None:
        """Prolong the lease until a session is refused for longer than one of this run's own lasts."""
        pause, num_refused = self.timings.lease_seconds / 2, 0
        # SGLang looks once a second for sessions that have ended.
        while num_refused * self.timings.retry_seconds < self.timings.lease_seconds + 4 * self.timings.retry_seconds:
            await asyncio.sleep(pause)
            pause = self.timings.retry_seconds
            try:
                async with self._attempts:
                    is_prolonged = await self._or_refused(self._take_anew() if self._is_over else self._prolong())
            except RolloutError:
                # The pool finds out whether a server is gone. A busy scheduler may open the session later, and then
                # refuses this run for as long as that session lasts.
                num_refused = 0
                continue
            if is_prolonged:
                num_refused, pause = 0, self.timings.lease_seconds / 2
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
            # The call may have arrived late, when another run had opened the other session already.
            await self._end(_SESSIONS[other])
            return False
        self._number, self._opened = other, before
        return True

    async def _or_refused(self, attempt: Awaitable[bool]) -> bool:
        """Return whether the attempt succeeded. Raises RolloutError without an answer of the scheduler.

        SGLang's front end may refuse by itself: because of a call of another run that waits for the busy scheduler, or
        of a call of this run whose connection was lost.
        """
        if await attempt:
            return True
        try:
            async with asyncio.timeout(self.timings.call_seconds):
                await self._client.server_info()
        except TimeoutError:
            message = f"{self._client.url}/server_info gave no answer within {self.timings.call_seconds:g} s"
            raise RolloutError(message) from None
        self.last_answer = time.monotonic()
        return False

    async def _try_to_open(self, name: str) -> bool:
        """Return whether the session is open now. Raises RolloutError without an answer."""
        if name in self._calls:
            opened = await self._answer(name)
            if opened is not None and time.monotonic() - opened < self.timings.lease_seconds / 2:
                await self._end(name)  # this run has opened it, and cannot tell for how long it has it
        self._calls[name] = call = asyncio.create_task(self._open(name))
        call.add_done_callback(_read)
        return await self._answer(name) is not None

    async def _open(self, name: str) -> float:
        # Until the scheduler has answered, SGLang's front end refuses every other call for this name.
        body = {"session_id": name, "timeout": self.timings.lease_seconds, "capacity_of_str_len": 0}
        await self._client.post("/open_session", body, self.timings.late_seconds)
        return time.monotonic()

    async def _answer(self, name: str) -> float | None:
        """Return when the last call to open the session was granted; None if it was refused.

        Raises RolloutError without an answer.
        """
        call = self._calls[name]
        if not (await asyncio.wait({call}, timeout=self.timings.call_seconds))[0]:
            raise RolloutError(f"{self._client.url}/open_session gave no answer within {self.timings.call_seconds:g} s")
        del self._calls[name]
        try:
            opened = call.result()
        except RequestRefused:
            return None
        self.last_answer = opened
        return opened

    async def _end(self, name: str) -> None:
        await self._client.post("/close_session", {"session_id": name}, self.timings.call_seconds)


def _read(call: asyncio.Task[float]) -> None:
    """Take note of the failure of a call that nobody waits for, which is no fault."""
    if not call.cancelled():
        call.exception()

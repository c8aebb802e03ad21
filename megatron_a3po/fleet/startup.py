"""Wait for the servers at the start of a run: each goes through its own steps until all are ready or time is up."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.client import KeyRefused
from megatron_a3po.fleet.membership import Membership, Server
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.waiting import Wait

type Step = Callable[[Server], Awaitable[None]]
"""Raises RolloutError while the server has not come so far."""


class Occupied(RolloutError):
    """Another run that is alive publishes to the server."""


class Unusable(RolloutError):
    """The server works, but does not meet the run's requirements."""


class Startup:
    """The servers on their way through the steps, and why each of them is not through yet."""

    def __init__(self, membership: Membership, steps: Sequence[Step], *, look_seconds: float) -> None:
        """look_seconds: between two attempts of a step."""
        self._membership = membership
        self._steps = steps
        self._look_seconds = look_seconds
        self._reasons: dict[Server, str] = {}

    async def run(self, look: Callable[[], None], timeout_seconds: float) -> None:
        """Have every member go through the steps.

        A server that another run occupies goes into quarantine, and so do all servers that are not through after the
        timeout. look: called every moment. Raises what `look` raises, RolloutError when too few servers are left, and
        KeyRefused and Unusable at once.
        """
        wait = Wait(timeout_seconds)
        tasks = {server: asyncio.create_task(self._go(server)) for server in self._membership.members}
        try:
            while waiting := {server: task for server, task in tasks.items() if not task.done()}:
                look()
                self._membership.raise_if_too_few()
                if wait.is_over:
                    for server in waiting:
                        self._membership.quarantine(server, self._not_ready(server, timeout_seconds))
                    break
                if wait.is_reminder_due:
                    logger.info("waiting for %s", self._list(waiting))
                done, _ = await asyncio.wait(
                    waiting.values(), timeout=self._look_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
            self._membership.raise_if_too_few()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _go(self, server: Server) -> None:
        for step in self._steps:
            while True:
                try:
                    await step(server)
                    break
                except (KeyRefused, Unusable):
                    raise
                except Occupied as error:
                    self._membership.quarantine(server, error)
                    return
                except RolloutError as error:
                    self._reasons[server] = str(error)
                await asyncio.sleep(self._look_seconds)

    def _not_ready(self, server: Server, timeout_seconds: float) -> RolloutError:
        return RolloutError(
            f"{server.url}: not ready within {timeout_seconds:g} s{self._reason(server)}; see the server's log, or "
            "raise rollout.start_timeout_seconds"
        )

    def _list(self, servers: Iterable[Server]) -> str:
        return ", ".join(f"{server.url}{self._reason(server)}" for server in servers)

    def _reason(self, server: Server) -> str:
        return f" ({self._reasons[server]})" if server in self._reasons else ""

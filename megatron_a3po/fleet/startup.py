"""The start of a run at its servers: each is waited for by itself, until all are ready or the time is up."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.client import KeyRefused
from megatron_a3po.fleet.membership import Server, ServerStates
from megatron_a3po.runtime.logging import logger

_LOOK_SECONDS = 0.25
_HEARTBEAT_SECONDS = 20.0

type Step = Callable[[Server], Awaitable[None]]
"""Raises RolloutError while the server is not so far"""


class Occupied(RolloutError):
    """Another run that is alive publishes to the server."""


class Unusable(RolloutError):
    """The server is well, and not as this run needs it."""


async def connect(
    states: ServerStates, steps: Sequence[Step], *, look: Callable[[], None], timeout_seconds: float
) -> None:
    """Have every member go through the steps. One that another run has goes into quarantine, and after the timeout so
    do all that are not through.

    look: called every moment. Raises what it raises, RolloutError when too few servers are left, and KeyRefused and
    Unusable at once.
    """
    loop = asyncio.get_running_loop()
    deadline, next_message = loop.time() + timeout_seconds, loop.time() + _HEARTBEAT_SECONDS
    reasons: dict[Server, str] = {}
    tasks = {server: asyncio.create_task(_go(server, steps, states, reasons)) for server in states.members}
    try:
        while waiting := {server: task for server, task in tasks.items() if not task.done()}:
            look()
            states.raise_if_too_few()
            if loop.time() >= deadline:
                for server in waiting:
                    states.quarantine(server, _not_ready(server, timeout_seconds, reasons))
                break
            if loop.time() >= next_message:
                logger.info("waiting for %s", _list(waiting, reasons))
                next_message = loop.time() + _HEARTBEAT_SECONDS
            done, _ = await asyncio.wait(waiting.values(), timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        states.raise_if_too_few()
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _go(server: Server, steps: Sequence[Step], states: ServerStates, reasons: dict[Server, str]) -> None:
    for step in steps:
        while True:
            try:
                await step(server)
                break
            except (KeyRefused, Unusable):
                raise
            except Occupied as error:
                states.quarantine(server, error)
                return
            except RolloutError as error:
                reasons[server] = str(error)
            await asyncio.sleep(_LOOK_SECONDS)


def _not_ready(server: Server, timeout_seconds: float, reasons: dict[Server, str]) -> RolloutError:
    return RolloutError(
        f"{server.url}: not ready within {timeout_seconds:g} s{_reason(server, reasons)}; see the server's log, or "
        "raise rollout.start_timeout_seconds"
    )


def _list(servers: Iterable[Server], reasons: dict[Server, str]) -> str:
    return ", ".join(f"{server.url}{_reason(server, reasons)}" for server in servers)


def _reason(server: Server, reasons: dict[Server, str]) -> str:
    return f" ({reasons[server]})" if server in reasons else ""

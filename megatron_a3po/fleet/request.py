"""One request to one server. Silence decides about a server, not the time that an answer takes: a long response, a
queue and a pause are no faults."""

import asyncio
from typing import Any

from megatron_a3po.errors import RolloutError, RolloutServerDied
from megatron_a3po.fleet.client import KeyRefused, RequestRefused
from megatron_a3po.fleet.membership import Quarantined, Server, ServerStates
from megatron_a3po.fleet.protocol import GenerateResponse
from megatron_a3po.runtime.logging import logger

PATIENCE = 4.0
"""A request waits for so many times the silence that costs a server its place."""
_LOOK_SECONDS = 1.0
"""A server is found silent twice, so far apart: it may have been this process that stood still."""


class Overdue(RolloutError):
    """A server that lives has not answered one request."""


async def ask(
    states: ServerStates, server: Server, request: dict[str, Any], *, silence_seconds: float, patience_seconds: float
) -> list[GenerateResponse]:
    """The responses, which `states` hears of.

    Raises Quarantined when the server is out before its responses are accepted, Overdue after `patience_seconds`, and
    RolloutError when the server has given no sign of life for `silence_seconds`. Publications do not count.
    """
    confirmed = server.version
    assert confirmed is not None
    if server.client.in_flight == 0:
        server.heard = states.clock()
    server.client.in_flight += 1
    try:
        responses = await _wait(states, server, request, silence_seconds, patience_seconds)
    finally:
        server.client.in_flight -= 1
    if (problem := server.label_problem(responses, confirmed)) is not None:
        states.quarantine(server, problem)
        raise Quarantined(f"{server.url} was put into quarantine")
    states.accept(server)
    return responses


async def _wait(
    states: ServerStates, server: Server, request: dict[str, Any], silence_seconds: float, patience_seconds: float
) -> list[GenerateResponse]:
    work = asyncio.ensure_future(server.unless_quarantined(_verify_and_ask(states, server, request)))
    started, was_silent = states.clock(), False
    try:
        while True:
            left, patience = silence_seconds - states.silence(server), patience_seconds - (states.clock() - started)
            if left <= 0 and was_silent:
                raise RolloutError(
                    f"{server.url} has given no sign of life for {silence_seconds:g} s while requests were under way; "
                    "see the server's log, or raise rollout.request_timeout_seconds"
                )
            if left > 0 and patience <= 0:
                raise Overdue(
                    f"{server.url} lives, and has not answered a request for {patience_seconds:g} s (where many take "
                    "so long, raise rollout.request_timeout_seconds)"
                )
            was_silent = left <= 0
            if (await asyncio.wait({work}, timeout=max(min(left, patience), _LOOK_SECONDS)))[0]:
                return work.result()
    finally:
        work.cancel()


async def _verify_and_ask(states: ServerStates, server: Server, request: dict[str, Any]) -> list[GenerateResponse]:
    await _verify(states, server)
    return await server.client.generate(request)


async def _verify(states: ServerStates, server: Server) -> None:
    """A server that a connection was lost to may be another process by now. A busy one, whose scheduler has to answer,
    is asked for as long as it takes. Raises RolloutServerDied without a connection or when it refuses, Quarantined when
    it is another process."""
    while server.is_suspect:
        try:
            info = await server.client.server_info()
        except RolloutServerDied:
            raise
        except (RequestRefused, KeyRefused) as error:
            raise RolloutServerDied(str(error)) from None
        except RolloutError as error:
            logger.debug("%s; it is asked again", error)
            await asyncio.sleep(_LOOK_SECONDS)
            continue
        if server.info is not None and info.startup_time != server.info.startup_time:
            states.quarantine(server, RolloutError(f"{server.url} was restarted, with weights of its own"))
            raise Quarantined(f"{server.url} was restarted")
        server.is_suspect = False

"""Send one request to one server.

Silence decides about a server, not the time that an answer takes: a long response, a queue and a pause are no faults.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from megatron_a3po.errors import RolloutError, RolloutServerDied
from megatron_a3po.fleet.client import KeyRefused, RequestRefused
from megatron_a3po.fleet.membership import Membership, Quarantined, Server
from megatron_a3po.fleet.protocol import GenerateResponse
from megatron_a3po.runtime.logging import logger


class Overdue(RolloutError):
    """A server that lives has not answered one request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a request waits, in seconds; publications do not count."""

    silence_seconds: float
    """A server without a sign of life for so long has failed."""
    answer_seconds: float
    """A request that a living server has not answered for so long is overdue."""
    look_seconds: float
    """Seconds between two looks, both of which must find a server silent: this process itself may have stood still."""


async def ask(
    membership: Membership, server: Server, request: dict[str, Any], patience: Patience
) -> list[GenerateResponse]:
    """Return the responses of the server, once their version labels are checked.

    Raises Quarantined when the server goes into quarantine before its responses are accepted, Overdue when it lives and
    does not answer, and RolloutError when it is silent.
    """
    confirmed = server.version
    assert confirmed is not None
    if server.client.in_flight == 0:
        server.last_heard = membership.clock()
    server.client.in_flight += 1
    try:
        responses = await _wait(membership, server, request, patience)
    finally:
        server.client.in_flight -= 1
    if not server.is_member:  # since the answer came: the event loop has gone on between
        raise Quarantined(f"{server.url} was put into quarantine")
    if (problem := server.label_problem(responses, confirmed)) is not None:
        membership.quarantine(server, problem)
        raise Quarantined(f"{server.url} was put into quarantine")
    membership.accept(server)
    return responses


async def _wait(
    membership: Membership, server: Server, request: dict[str, Any], patience: Patience
) -> list[GenerateResponse]:
    asking = _verify_and_ask(membership, server, request, patience.look_seconds)
    work = asyncio.ensure_future(server.unless_quarantined(asking))
    started, was_silent = membership.clock(), False
    try:
        while True:
            until_silent = patience.silence_seconds - membership.silence(server)
            until_overdue = patience.answer_seconds - (membership.clock() - started)
            if until_silent <= 0 and was_silent:
                raise RolloutError(
                    f"{server.url} has given no sign of life for {patience.silence_seconds:g} s while requests were "
                    "under way; see the server's log, or raise rollout.request_timeout_seconds"
                )
            if until_silent > 0 and until_overdue <= 0:
                raise Overdue(
                    f"{server.url} lives, and has not answered a request for {patience.answer_seconds:g} s (where many "
                    "take so long, raise rollout.request_timeout_seconds)"
                )
            was_silent = until_silent <= 0
            timeout = max(min(until_silent, until_overdue), patience.look_seconds)
            if (await asyncio.wait({work}, timeout=timeout))[0]:
                return work.result()
    finally:
        work.cancel()


async def _verify_and_ask(
    membership: Membership, server: Server, request: dict[str, Any], look_seconds: float
) -> list[GenerateResponse]:
    await _verify(membership, server, look_seconds)
    return await server.client.generate(request)


async def _verify(membership: Membership, server: Server, look_seconds: float) -> None:
    """Check that the process that answers is the one that was there before a connection was lost.

    A busy server, whose scheduler has to answer, is asked for as long as that takes. Raises RolloutServerDied when the
    server cannot be reached or refuses, and Quarantined when it is another process.
    """
    while server.is_suspect:
        try:
            info = await server.client.server_info()
        except RolloutServerDied:
            raise
        except (RequestRefused, KeyRefused) as error:
            raise RolloutServerDied(str(error)) from None
        except RolloutError as error:
            logger.debug("%s; asking again", error)
            await asyncio.sleep(look_seconds)
            continue
        if server.info is not None and info.startup_time != server.info.startup_time:
            membership.quarantine(server, RolloutError(f"{server.url} was restarted, with weights of its own"))
            raise Quarantined(f"{server.url} was restarted")
        server.is_suspect = False

"""How servers get out of a publication that failed, and back into one after a quarantine."""

import asyncio
import time
from collections.abc import Sequence

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.client import KeyRefused, RequestRefused
from megatron_a3po.fleet.lease import RETRY_SECONDS
from megatron_a3po.fleet.membership import Server
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import ServerInfo
from megatron_a3po.fleet.startup import Occupied
from megatron_a3po.runtime.logging import logger

GRACE_SECONDS = 5.0
"""For the answer of a server that only waited for the one that failed"""
_RETURN_SECONDS = 10.0


async def leave_group(pool: ServerPool, server: Server, name: str, timeout_seconds: float | None = None) -> None:
    """Also where the server is in no such group. Raises RolloutError when it does not answer."""
    try:
        await pool.post(server, "/destroy_weights_update_group", {"group_name": name}, timeout_seconds)
    except RequestRefused as error:
        # 400 is the answer where there is no such group.
        logger.debug("no group to leave: %s", error)
    if name in server.groups:
        server.groups.remove(name)


async def undo_publication(pool: ServerPool, participants: Sequence[Server]) -> None:
    """After a failure: nobody stays in a group or a session, and those that hold a whole version go on sampling.

    Whoever does not answer to that goes into quarantine. Whoever holds parts of a version stays paused.
    """
    pool.has_failed = True

    async def undo(server: Server) -> None:
        try:
            await _leave(pool, server)
            if server.error is None and server.is_whole:
                await pool.post(server, "/continue_generation", {}, GRACE_SECONDS)
        except RolloutError as error:
            pool.states.quarantine(server, error)

    await asyncio.gather(*map(undo, participants))


async def take_back_leases(pool: ServerPool, timeout_seconds: float) -> None:
    """Of servers that another run may have taken while this one stood still, or had no answer; those that it has go
    into quarantine. A server whose scheduler is busy has as long as for any call of a publication."""

    async def take_back(server: Server) -> None:
        deadline, is_told = time.monotonic() + timeout_seconds, False
        while server.error is None and not server.lease.is_held:
            try:
                await pool.take(server)
            except (Occupied, KeyRefused) as error:
                pool.states.quarantine(server, error)
            except RolloutError as error:
                if time.monotonic() >= deadline:
                    text = f"{error}; so it was for publish.timeout_seconds = {timeout_seconds:g}"
                    pool.states.quarantine(server, type(error)(text))
                    return
                if not is_told:
                    logger.warning("%s; the publication waits for it", error)
                    is_told = True
                await asyncio.sleep(RETRY_SECONDS)

    await asyncio.gather(*(take_back(server) for server in pool.states.members if server.lease.has_run_out))


async def call_back(pool: ServerPool, *, at_once: bool) -> None:
    """Have servers in quarantine that answer again take part: they leave what they were in, and drop their requests,
    which were given to others. Nothing is continued there. at_once: also those that failed often."""

    async def ask(server: Server) -> None:
        if server.skips > 0 and not at_once:
            server.skips -= 1
            return
        try:
            async with asyncio.timeout(_RETURN_SECONDS):
                info = await _returned(pool, server)
        except TimeoutError:
            problem = f"{server.url} was not ready to take part within {_RETURN_SECONDS:g} s; see its log"
            pool.states.keep_out(server, RolloutError(problem))
        except RolloutError as error:
            pool.states.keep_out(server, error)
        else:
            pool.states.take_back(server, info)

    await asyncio.gather(*map(ask, pool.states.quarantined))


async def _returned(pool: ServerPool, server: Server) -> ServerInfo:
    info = await server.client.server_info()
    if (problem := pool.unusable(server, info)) is not None:
        raise RolloutError(problem)
    if not await server.lease.take():
        raise RolloutError(await pool.occupied(server))
    # Not after a call that is still under way: the end of an update waits for requests unless the server is paused.
    await server.client.post("/abort_request", {"abort_all": True}, GRACE_SECONDS)
    await _leave(pool, server)
    return info


async def _leave(pool: ServerPool, server: Server) -> None:
    """Raises RolloutError when the server does not answer."""
    try:
        async with asyncio.timeout(GRACE_SECONDS), server.calls:
            pass
    except TimeoutError:
        if server.call is not None:
            server.call.cancel()
        raise RolloutError(f"{server.url} gave no answer to a call of the publication") from None
    for name in list(server.groups):
        await leave_group(pool, server, name, GRACE_SECONDS)
    try:
        await pool.post(server, "/end_weight_update", {}, GRACE_SECONDS)
    except RequestRefused as error:
        # 400 is the answer where no session is open.
        logger.debug("ended already: %s", error)

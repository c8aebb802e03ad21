"""Get servers out of a publication that failed, and back into one after a quarantine."""

import asyncio
import time
from collections.abc import Sequence

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.client import KeyRefused, RequestRefused
from megatron_a3po.fleet.membership import Server
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import ServerInfo
from megatron_a3po.fleet.startup import Occupied
from megatron_a3po.runtime.logging import logger


async def leave_group(pool: ServerPool, server: Server, name: str, timeout_seconds: float | None = None) -> None:
    """Have the server leave an update group, or find that it is in none. Raises RolloutError without an answer."""
    try:
        await pool.post(server, "/destroy_weights_update_group", {"group_name": name}, timeout_seconds)
    except RequestRefused as error:
        # 400 is the answer where there is no such group.
        logger.debug("no group to leave: %s", error)
    if name in server.control.groups:
        server.control.groups.remove(name)


async def undo_publication(pool: ServerPool, participants: Sequence[Server]) -> None:
    """After a failure, end groups and update sessions; servers that hold a whole version go on sampling.

    A server that does not answer goes into quarantine. A server that holds parts of a version stays paused.
    """
    pool.publication_has_failed = True

    async def undo(server: Server) -> None:
        try:
            await _leave(pool, server)
            if server.is_whole:
                await pool.post(server, "/continue_generation", {}, pool.timings.grace_seconds)
        except RolloutError as error:
            pool.membership.quarantine(server, error)

    await asyncio.gather(*map(undo, participants))


async def take_back_leases(pool: ServerPool, timeout_seconds: float) -> None:
    """Take the leases again that ran out while this run stood still or had no answer.

    A server that another run has taken meanwhile goes into quarantine. A server whose scheduler is busy has as long as
    for any call of a publication.
    """

    async def take_back(server: Server) -> None:
        deadline, is_told = time.monotonic() + timeout_seconds, False
        while server.is_member and not server.lease.is_held:
            try:
                await pool.take(server)
            except (Occupied, KeyRefused) as error:
                pool.membership.quarantine(server, error)
            except RolloutError as error:
                if time.monotonic() >= deadline:
                    text = f"{error}, and not within publish.timeout_seconds = {timeout_seconds:g}"
                    pool.membership.quarantine(server, type(error)(text))
                    return
                if not is_told:
                    logger.warning("%s; the publication waits for it", error)
                    is_told = True
                await asyncio.sleep(pool.timings.lease.retry_seconds)

    await asyncio.gather(*(take_back(server) for server in pool.membership.members if server.lease.has_run_out))


async def call_back(pool: ServerPool, *, at_once: bool) -> None:
    """Have servers in quarantine that answer again take part in the next publication.

    They leave the groups and sessions that they were in, and drop their requests, which other servers have got.
    at_once: ask also those whose turn has not come.
    """

    async def ask(server: Server) -> None:
        if not at_once and not server.may_return():
            return
        try:
            async with asyncio.timeout(pool.timings.return_seconds):
                info = await _prepare_return(pool, server)
        except TimeoutError:
            problem = f"{server.url} was not ready to take part within {pool.timings.return_seconds:g} s; see its log"
            pool.membership.keep_out(server, RolloutError(problem))
        except RolloutError as error:
            pool.membership.keep_out(server, error)
        else:
            pool.membership.take_back(server, info)

    await asyncio.gather(*map(ask, pool.membership.quarantined))


async def _prepare_return(pool: ServerPool, server: Server) -> ServerInfo:
    info = await server.client.server_info()
    if (problem := pool.unusable(server, info)) is not None:
        raise RolloutError(problem)
    if not await server.lease.take():
        raise RolloutError(await pool.occupied(server))
    # Abort first: the control call that may still be under way waits for requests to end, unless the server is paused.
    await server.client.post("/abort_request", {"abort_all": True}, pool.timings.grace_seconds)
    await _leave(pool, server)
    return info


async def _leave(pool: ServerPool, server: Server) -> None:
    """End all groups and the update session of the server. Raises RolloutError without an answer."""
    grace_seconds = pool.timings.grace_seconds
    try:
        async with asyncio.timeout(grace_seconds), server.control.lock:
            pass
    except TimeoutError:
        if server.control.current is not None:
            server.control.current.cancel()
        raise RolloutError(f"{server.url} gave no answer to a call of the publication") from None
    for name in list(server.control.groups):
        await leave_group(pool, server, name, grace_seconds)
    try:
        await pool.post(server, "/end_weight_update", {}, grace_seconds)
    except RequestRefused as error:
        # 400 is the answer where no session is open.
        logger.debug("the session has ended already: %s", error)

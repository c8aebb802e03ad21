"""All rollout servers together: generation goes to the least busy one, control calls go to each."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from megatron_a3po.errors import RolloutError, RolloutServerDied
from megatron_a3po.fleet.client import KEEP_ALIVE_SECONDS, RequestRefused, SGLangClient
from megatron_a3po.fleet.lease import LEASE_SECONDS, RETRY_SECONDS
from megatron_a3po.fleet.membership import Quarantined, Server, ServerStates
from megatron_a3po.fleet.protocol import GenerateResponse, ServerInfo, is_unfinished
from megatron_a3po.fleet.request import PATIENCE, Overdue, ask
from megatron_a3po.fleet.requirements import Demands, unusable
from megatron_a3po.fleet.startup import Occupied, Unusable, connect
from megatron_a3po.runtime.logging import logger

_WATCH_SECONDS = 1.0
_MISSED_ANSWERS = 5
"""So many failed looks in a row mean that a server is gone."""
_ATTEMPTS = 3
_RETRY_SECONDS = 1.0
"""Before the second attempt; twice as long before the third."""
_RESET_SECONDS = 10.0


class ServerPool:
    """Lives in one event loop. `find_dead` tells of local processes that ended, as a message; None while all live."""

    def __init__(
        self,
        urls: list[str],
        *,
        timeout_seconds: float,
        key: str | None = None,
        run: str | None = None,
        min_servers: int | None = None,
        pause_mode: str = "retract",
        longest_request: int = 0,
        find_dead: Callable[[], str | None] = lambda: None,
    ) -> None:
        """run: who this is, for other runs. min_servers: with fewer that are not in quarantine, everything here raises;
        None: all of them. longest_request: tokens of a prompt and its response, at most."""
        # Created inside the loop: aiohttp binds the session to the loop that runs then.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
        self._session = aiohttp.ClientSession(connector=connector)
        self._make_client = lambda url: SGLangClient(url, self._session, timeout_seconds, key)
        self.clients = list(map(self._make_client, urls))
        self.run = run
        self.states = ServerStates([Server(client, run) for client in self.clients], min_servers)
        self.pause_mode = pause_mode
        self._demands = Demands(pause_mode=pause_mode, longest_request=longest_request)
        self.num_pauses = 0
        self.has_failed = False
        """A publication has failed: what fails now is a consequence, and no server is to blame for it."""
        self._silence_seconds = timeout_seconds
        self._find_dead = find_dead

    def add(self, url: str) -> None:
        """A server that has come since. It takes part from the next publication on that calls servers back."""
        client = self._make_client(url)
        if client.url not in (known.url for known in self.clients):
            self.clients.append(client)
            self.states.welcome(Server(client, self.run))

    async def wait_ready(self, timeout_seconds: float) -> list[ServerInfo]:
        """Wait until every server takes requests, have it for this run, and clear what a run that died left there.

        A paused server answers but is not ready, so the clearing comes in between. One that holds parts of a version
        stays paused, until all of one is published to it. After the timeout, the servers that are not ready go into
        quarantine. Raises RolloutServerDied or RolloutError.
        """
        self.states.raise_if_too_few()
        steps = (_is_answering, self.take, self.reset, _is_ready, self.describe)
        await connect(self.states, steps, look=self._look_at_process, timeout_seconds=timeout_seconds)
        return [server.info for server in self.states.members if server.info is not None]

    async def take(self, server: Server) -> None:
        """Raises Occupied when another run that is alive publishes there, RolloutError when it does not answer."""
        deadline = None
        while not await server.lease.take():
            now = asyncio.get_running_loop().time()
            if deadline is None:
                # As long as a run that has ended, or a call of this one that was given up, may stand in the way.
                deadline = now + LEASE_SECONDS + 5 * RETRY_SECONDS
            if now > deadline:
                raise Occupied(await self.occupied(server))
            await asyncio.sleep(RETRY_SECONDS)

    async def occupied(self, server: Server) -> str:
        label = await server.client.weight_version()
        return (
            f"{server.url}: another run that is alive publishes to this server, whose weights are version {label}; end "
            "that run, or give this one servers of its own (`rollout.servers`)"
        )

    async def describe(self, server: Server) -> None:
        """Ask how it was started. Raises Unusable."""
        server.info = await server.client.server_info()
        if (problem := self.unusable(server, server.info)) is not None:
            raise Unusable(problem)

    def unusable(self, server: Server, info: ServerInfo) -> str | None:
        """Why this run cannot use such a server, with the remedy; None if it can."""
        return unusable(server.url, info, self._demands)

    async def generate(self, request: dict[str, Any], chosen: Server | None = None) -> list[GenerateResponse]:
        """Ask `chosen`, or the least busy server, which holds a confirmed version; if it goes into quarantine, another.

        `chosen` is for short requests, and is waited for no longer than a silent server is. A lost connection is tried
        again, on another server if there is one; so is a request that its server does not answer, with more patience
        every time: it may simply take so long. Raises RequestRefused, and RolloutError when the servers are too few.
        """
        lost, silence = 0, self._silence_seconds
        patience = silence if chosen is not None else PATIENCE * silence
        failed: Server | None = None
        while True:
            server = chosen if chosen is not None and chosen.is_routable else await self._choose(failed)
            try:
                return await ask(self.states, server, request, silence_seconds=silence, patience_seconds=patience)
            except RequestRefused:
                raise
            except Overdue as error:
                logger.warning("%s; it goes to another server, if there is one", error)
                chosen, failed, patience = None, server, 2 * patience
            except Quarantined as error:
                logger.info("%s; its request goes to another server", error)
            except RolloutServerDied as error:
                lost, failed, server.is_suspect = lost + 1, server, True
                self._look_at_process()
                self.states.raise_if_too_few()
                if lost % _ATTEMPTS == 0:
                    self.states.quarantine(server, error)
                else:
                    logger.warning("%s; trying again", error)
                    await asyncio.sleep(lost % _ATTEMPTS * _RETRY_SECONDS)
            except RolloutError as error:
                self.states.quarantine(server, error)

    async def _choose(self, failed: Server | None) -> Server:
        while True:
            self.states.raise_if_too_few()
            routable = [server for server in self.states.members if server.is_routable]
            if routable:
                # A server that loses its connections at once is always the least busy one.
                others = [server for server in routable if server is not failed]
                return min(others or routable, key=lambda server: server.client.in_flight)
            await self.states.wait_for_change()

    async def post_to_all(
        self, path: str, body: dict[str, Any], timeout_seconds: float | None = None, *, together: bool = False
    ) -> list[Any]:
        """The same call to every server that is not in quarantine; see `for_each`."""
        return await self.for_each(lambda server: self.post(server, path, body, timeout_seconds), together=together)

    async def for_each[T](self, ask: Callable[[Server], Awaitable[T]], *, together: bool = False) -> list[T]:
        """Ask every server that is not in quarantine, at once.

        A server that fails goes into quarantine, and the first failure is raised. together: servers wait for each
        other while they are asked, so others fail when the first has failed, and through no fault of theirs.
        """
        failed: list[Server] = []

        async def ask_one(server: Server) -> T:
            try:
                return await ask(server)
            except RolloutError as error:
                is_consequence = together and (bool(failed) or self.has_failed)
                failed.append(server)
                if isinstance(error, RolloutServerDied):
                    # The end of a local process may show a moment after the end of its connections, and says more.
                    await asyncio.sleep(_RETRY_SECONDS)
                    self._look_at_process()
                if not is_consequence:
                    self.states.quarantine(server, error)
                raise server.error or error from None

        return list(await asyncio.gather(*map(ask_one, self.states.members)))

    async def post(self, server: Server, path: str, body: dict[str, Any], timeout_seconds: float | None = None) -> Any:
        """A control call, after the one before it has ended."""
        async with server.calls:
            server.call = asyncio.ensure_future(server.client.post(path, body, timeout_seconds))
            answer = await server.call
        says_so = isinstance(answer, dict) and answer.get("success")
        if path.startswith("/update_weights") and not says_so:
            raise RequestRefused(f"{server.url} did not load weights: {answer}")
        return answer

    async def reset(self, server: Server) -> None:
        """Undo what a run that died may have left at a server: requests, an open update session, a pause."""
        label = (await server.client.model_info()).weight_version
        resume = [] if is_unfinished(label) else ["/continue_generation"]
        # SGLang ends an update of a server that is not paused only when no request is left.
        await self.post(server, "/abort_request", {"abort_all": True}, _RESET_SECONDS)
        for path in ["/end_weight_update", *resume]:
            try:
                await self.post(server, path, {}, _RESET_SECONDS)
            except RequestRefused as error:
                # 400 is the answer where there is nothing to undo.
                logger.debug("reset: %s", error)

    async def watch(self) -> None:
        """Runs until the servers are too few; then raises RolloutError, which names those that failed."""
        tasks = [asyncio.create_task(self.states.wait_until_too_few())]
        try:
            while True:
                # One for each server; those that have come since are behind the others.
                tasks += [asyncio.create_task(self._watch(server)) for server in self.states.servers[len(tasks) - 1 :]]
                done, _ = await asyncio.wait(tasks, timeout=_WATCH_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def _watch(self, server: Server) -> None:
        missed = 0
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self._look_at_process()
            if server.lease.is_lost:
                self.states.quarantine(server, RolloutError(await self.occupied(server)))
            before = server.version, server.is_whole, server.error
            label = await server.client.weight_version()
            if server.error is not None or before != (server.version, server.is_whole, server.error):
                missed = 0
                continue  # it is looked at again before it takes part in a publication, or one has changed it
            missed = missed + 1 if label is None else 0
            server.is_suspect = server.is_suspect or label is None
            if missed >= _MISSED_ANSWERS:
                error = f"{server.url}: nothing answers there any more; is the server running?"
                self.states.quarantine(server, RolloutServerDied(error))
            elif label is not None and server.is_whole and label != server.label:
                self.states.quarantine(
                    server,
                    RolloutError(
                        f"{server.url} holds weight version {label} instead of {server.label}; was it restarted, or "
                        "does another client publish to it?"
                    ),
                )

    async def close(self) -> None:
        await asyncio.gather(*(server.lease.release() for server in self.states.servers))
        await self._session.close()

    def _look_at_process(self) -> None:
        if (message := self._find_dead()) is not None:
            for server in self.states.members:
                self.states.quarantine(server, RolloutServerDied(message))


async def _is_answering(server: Server) -> None:
    await server.client.model_info()


async def _is_ready(server: Server) -> None:
    """Also when it is kept paused since it holds parts of a version: a publication is what it waits for."""
    if not await server.client.is_ready() and not is_unfinished(await server.client.weight_version() or ""):
        raise RolloutError(f"{server.url}/ready does not answer that it is")

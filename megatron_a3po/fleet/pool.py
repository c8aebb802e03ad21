"""All rollout servers together: a request goes to the least busy one, a control call to each."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from megatron_a3po.config.server_requirements import Demands
from megatron_a3po.errors import RolloutError, RolloutServerDied
from megatron_a3po.fleet.client import RequestRefused, SGLangClient
from megatron_a3po.fleet.lease import Lease
from megatron_a3po.fleet.membership import Membership, Quarantined, Server
from megatron_a3po.fleet.protocol import GenerateResponse, ServerInfo, is_unfinished
from megatron_a3po.fleet.request import Overdue, Patience, ask
from megatron_a3po.fleet.requirements import unusable
from megatron_a3po.fleet.startup import Occupied, Startup, Unusable
from megatron_a3po.fleet.timings import DEFAULT_TIMINGS, FleetTimings
from megatron_a3po.runtime.logging import logger


class ServerPool:
    """The servers of a run, in one event loop."""

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
        timings: FleetTimings = DEFAULT_TIMINGS,
    ) -> None:
        """timeout_seconds: after so much silence a server has failed. run: who this is, for other runs. min_servers:
        with fewer that are not in quarantine, everything here raises; None stands for all of them. longest_request:
        tokens of a prompt and its response, at most. find_dead: returns the message of a local server process that has
        ended, None while all live."""
        # Created inside the loop: aiohttp binds the session to the loop that runs then.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=timings.keep_alive_seconds)
        self._session = aiohttp.ClientSession(connector=connector)
        self._make_client = lambda url: SGLangClient(url, self._session, timeout_seconds, key)
        self.clients = list(map(self._make_client, urls))
        self.run = run
        self.timings = timings
        self.membership = Membership([self._make_server(client) for client in self.clients], min_servers)
        self.pause_mode = pause_mode
        self._demands = Demands(pause_mode=pause_mode, longest_request=longest_request)
        self.num_pauses = 0
        self.publication_has_failed = False
        """A publication has failed: what fails now is a consequence, and no server is to blame for it."""
        self._silence_seconds = timeout_seconds
        self._find_dead = find_dead

    def add(self, url: str) -> None:
        """Add a server that has come since. It takes part from the next publication that calls servers back."""
        client = self._make_client(url)
        if client.url not in (known.url for known in self.clients):
            self.clients.append(client)
            self.membership.welcome(self._make_server(client))

    def _make_server(self, client: SGLangClient) -> Server:
        return Server(client, Lease(client, self.timings.lease), self.run)

    async def wait_ready(self, timeout_seconds: float) -> list[ServerInfo]:
        """Wait until every server takes requests, lease it to this run, and undo what a dead run has left there.

        A paused server answers but is not ready, so the undoing comes in between. A server that holds parts of a
        version stays paused until a whole one is published to it. After the timeout, the servers that are not ready go
        into quarantine. Raises RolloutServerDied or RolloutError.
        """
        self.membership.raise_if_too_few()
        steps = (_is_answering, self.take, self.reset, _is_ready, self.describe)
        startup = Startup(self.membership, steps, look_seconds=self.timings.start_look_seconds)
        await startup.run(self._look_at_process, timeout_seconds)
        return [server.info for server in self.membership.members if server.info is not None]

    async def take(self, server: Server) -> None:
        """Lease the server to this run.

        Raises Occupied when another run that is alive publishes there, RolloutError when the server does not answer.
        """
        deadline, times = None, self.timings.lease
        while not await server.lease.take():
            now = asyncio.get_running_loop().time()
            if deadline is None:
                # As long as a run that has ended, or a call of this one that was given up, may stand in the way.
                deadline = now + times.lease_seconds + 5 * times.retry_seconds
            if now > deadline:
                raise Occupied(await self.occupied(server))
            await asyncio.sleep(times.retry_seconds)

    async def occupied(self, server: Server) -> str:
        """Return the message that another run has the server."""
        label = await server.client.weight_version()
        return (
            f"{server.url}: another run that is alive publishes to this server, whose weights are version {label}; end "
            "that run, or give this one servers of its own (`rollout.servers`)"
        )

    async def describe(self, server: Server) -> None:
        """Ask the server how it was started. Raises Unusable when it does not meet the requirements."""
        server.info = await server.client.server_info()
        if (problem := self.unusable(server, server.info)) is not None:
            raise Unusable(problem)

    def unusable(self, server: Server, info: ServerInfo) -> str | None:
        """Return why this run cannot use such a server, with the remedy; None if it can."""
        return unusable(server.url, info, self._demands)

    async def generate(self, request: dict[str, Any], chosen: Server | None = None) -> list[GenerateResponse]:
        """Send a request to `chosen`, or to the least busy server that holds a confirmed version.

        `chosen` is for short requests; it is waited for no longer than a silent server is. After a lost connection the
        request is sent again, to another server if there is one. A request that its server does not answer goes to
        another server with more patience each time: it may simply take so long. Raises RequestRefused, and
        RolloutError when too few servers are left.
        """
        timings, silence = self.timings, self._silence_seconds
        answer_seconds = silence if chosen is not None else timings.patience * silence
        num_lost = 0
        failed: Server | None = None
        while True:
            server = chosen if chosen is not None and chosen.is_routable else await self._choose(failed)
            patience = Patience(
                silence_seconds=silence, answer_seconds=answer_seconds, look_seconds=timings.request_look_seconds
            )
            try:
                return await ask(self.membership, server, request, patience)
            except RequestRefused:
                raise
            except Overdue as error:
                logger.warning("%s; the request goes to another server, if there is one", error)
                chosen, failed, answer_seconds = None, server, 2 * answer_seconds
            except Quarantined as error:
                logger.info("%s; its request goes to another server", error)
            except RolloutServerDied as error:
                num_lost, failed, server.is_suspect = num_lost + 1, server, True
                self._look_at_process()
                self.membership.raise_if_too_few()
                if num_lost % timings.attempts == 0:
                    self.membership.quarantine(server, error)
                else:
                    logger.warning("%s; trying again", error)
                    await asyncio.sleep(num_lost % timings.attempts * timings.retry_seconds)
            except RolloutError as error:
                self.membership.quarantine(server, error)

    async def _choose(self, failed: Server | None) -> Server:
        while True:
            self.membership.raise_if_too_few()
            routable = [server for server in self.membership.members if server.is_routable]
            if routable:
                # A server that loses its connections at once is always the least busy one.
                others = [server for server in routable if server is not failed]
                return min(others or routable, key=lambda server: server.client.in_flight)
            await self.membership.wait_for_change()

    async def post_to_all(
        self, path: str, body: dict[str, Any], timeout_seconds: float | None = None, *, together: bool = False
    ) -> list[Any]:
        """Make the same call to every server that is not in quarantine; see `for_each`."""
        return await self.for_each(lambda server: self.post(server, path, body, timeout_seconds), together=together)

    async def for_each[T](self, ask: Callable[[Server], Awaitable[T]], *, together: bool = False) -> list[T]:
        """Call `ask` for every server that is not in quarantine, at once, and return the results in their order.

        A server that fails goes into quarantine, and the first failure is raised. together: servers wait for each
        other while they are asked, so after the first failure the others fail through no fault of theirs.
        """
        failed: list[Server] = []

        async def ask_one(server: Server) -> T:
            try:
                return await ask(server)
            except RolloutError as error:
                is_consequence = together and (bool(failed) or self.publication_has_failed)
                failed.append(server)
                if isinstance(error, RolloutServerDied):
                    # The end of a local process may show a moment after the end of its connections, and says more.
                    await asyncio.sleep(self.timings.retry_seconds)
                    self._look_at_process()
                if not is_consequence:
                    self.membership.quarantine(server, error)
                raise server.error or error from None

        return list(await asyncio.gather(*map(ask_one, self.membership.members)))

    async def post(self, server: Server, path: str, body: dict[str, Any], timeout_seconds: float | None = None) -> Any:
        """Make a control call after the one before it has ended, and return the answer."""
        async with server.control.lock:
            server.control.current = asyncio.ensure_future(server.client.post(path, body, timeout_seconds))
            answer = await server.control.current
        says_so = isinstance(answer, dict) and answer.get("success")
        if path.startswith("/update_weights") and not says_so:
            raise RequestRefused(f"{server.url} did not load weights: {answer}")
        return answer

    async def reset(self, server: Server) -> None:
        """Undo what a dead run may have left at a server: requests, an open update session, a pause."""
        seconds = self.timings.reset_seconds
        label = (await server.client.model_info()).weight_version
        resume = [] if is_unfinished(label) else ["/continue_generation"]
        # SGLang ends an update of a server that is not paused only when no request is left.
        await self.post(server, "/abort_request", {"abort_all": True}, seconds)
        for path in ["/end_weight_update", *resume]:
            try:
                await self.post(server, path, {}, seconds)
            except RequestRefused as error:
                # 400 is the answer where there is nothing to undo.
                logger.debug("reset: %s", error)

    async def watch(self) -> None:
        """Look at all servers until too few are left; then raise RolloutError, which names those that failed."""
        tasks = [asyncio.create_task(self.membership.wait_until_too_few())]
        try:
            while True:
                # One task for each server; those that have come since are behind the others.
                new = self.membership.servers[len(tasks) - 1 :]
                tasks += [asyncio.create_task(self._watch(server)) for server in new]
                done, _ = await asyncio.wait(
                    tasks, timeout=self.timings.watch_seconds, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def _watch(self, server: Server) -> None:
        num_missed = 0
        while True:
            await asyncio.sleep(self.timings.watch_seconds)
            self._look_at_process()
            if server.lease.is_lost:
                self.membership.quarantine(server, RolloutError(await self.occupied(server)))
            before = server.state, server.version, server.error
            label = await server.client.weight_version()
            if not server.is_member or before != (server.state, server.version, server.error):
                num_missed = 0
                continue  # a publication has changed the server meanwhile, or looks at it before it takes part
            num_missed = num_missed + 1 if label is None else 0
            server.is_suspect = server.is_suspect or label is None
            if num_missed >= self.timings.missed_answers:
                error = f"{server.url}: nothing answers there any more; is the server running?"
                self.membership.quarantine(server, RolloutServerDied(error))
            elif label is not None and server.is_whole and label != server.label:
                self.membership.quarantine(
                    server,
                    RolloutError(
                        f"{server.url} holds weight version {label} instead of {server.label}; was it restarted, or "
                        "does another client publish to it?"
                    ),
                )

    async def close(self) -> None:
        """Give all leases back and end all connections."""
        await asyncio.gather(*(server.lease.release() for server in self.membership.servers))
        await self._session.close()

    def _look_at_process(self) -> None:
        if (message := self._find_dead()) is not None:
            for server in self.membership.members:
                self.membership.quarantine(server, RolloutServerDied(message))


async def _is_answering(server: Server) -> None:
    await server.client.model_info()


async def _is_ready(server: Server) -> None:
    """A server that is kept paused since it holds parts of a version is ready for the publication that it waits for."""
    if not await server.client.is_ready() and not is_unfinished(await server.client.weight_version() or ""):
        raise RolloutError(f"{server.url}/ready does not answer that it is")

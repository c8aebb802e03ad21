"""All rollout servers together: generation goes to the least busy one, control calls go to each."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from megatron_a3po.errors import RolloutError, RolloutServerDied
from megatron_a3po.rollout.client import KEEP_ALIVE_SECONDS, SGLangClient
from megatron_a3po.rollout.protocol import GenerateResponse, ServerInfo
from megatron_a3po.runtime.logging import logger

_WATCH_SECONDS = 1.0
_MISSED_ANSWERS = 5
"""So many failed looks in a row mean that a server is gone."""
_ATTEMPTS = 3
_RETRY_SECONDS = 1.0
"""Before the second attempt; twice as long before the third."""


class ServerPool:
    """Lives in one event loop. `find_dead` tells of local processes that ended, as a message; None while all live."""

    def __init__(
        self, urls: list[str], *, timeout_seconds: float, find_dead: Callable[[], str | None] = lambda: None
    ) -> None:
        # Created inside the loop: aiohttp binds the session to the loop that runs then.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
        self._session = aiohttp.ClientSession(connector=connector)
        self.clients = [SGLangClient(url, self._session, timeout_seconds) for url in urls]
        self._find_dead = find_dead

    async def wait_ready(self, timeout_seconds: float) -> list[ServerInfo]:
        """Wait until every server takes requests, and clear what a run that died left there.

        A paused server answers but is not ready, so the clearing comes in between. Raises RolloutServerDied or
        RolloutError.
        """
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        for is_there in (SGLangClient.is_answering, SGLangClient.is_ready):
            for client in self.clients:
                while not await is_there(client):
                    self._raise_if_dead()
                    if asyncio.get_running_loop().time() > deadline:
                        raise RolloutError(
                            f"{client.url}: not ready within {timeout_seconds:g} s; see the server's log, or raise "
                            "rollout.start_timeout_seconds"
                        )
                    await asyncio.sleep(0.25)
            if is_there is SGLangClient.is_answering:
                await self.reset()
        return [await client.server_info() for client in self.clients]

    async def generate(self, request: dict[str, Any]) -> list[GenerateResponse]:
        """Ask the least busy server; a lost connection is tried again, on another server if there is one."""
        failed: SGLangClient | None = None
        for attempt in range(1, _ATTEMPTS + 1):
            # A server that loses its connections at once is always the least busy one.
            others = [client for client in self.clients if client is not failed]
            client = min(others or self.clients, key=lambda client: client.in_flight)
            try:
                return await client.generate(request)
            except RolloutServerDied as error:
                self._raise_if_dead()
                if attempt == _ATTEMPTS:
                    raise
                logger.warning("%s; trying again", error)
                failed = client
                await asyncio.sleep(attempt * _RETRY_SECONDS)
        raise AssertionError("unreachable")

    async def post_to_all(
        self, path: str, bodies: dict[str, Any] | list[dict[str, Any]], timeout_seconds: float | None = None
    ) -> list[Any]:
        """The same call (or one body per server) to every server at once; the first failure is raised."""
        if isinstance(bodies, dict):
            bodies = [bodies] * len(self.clients)
        calls = (client.post(path, body, timeout_seconds) for client, body in zip(self.clients, bodies, strict=True))
        try:
            return list(await asyncio.gather(*calls))
        except RolloutServerDied:
            # The end of a local process may show a moment after the end of its connections, and says more.
            await asyncio.sleep(_RETRY_SECONDS)
            self._raise_if_dead()
            raise

    async def reset(self) -> None:
        """Undo what a run that died may have left at a server: an open update session, a pause."""
        await asyncio.gather(*(_reset(client) for client in self.clients))

    async def watch(self) -> None:
        """Runs until a server is found dead; then raises RolloutServerDied."""
        missed = dict.fromkeys(self.clients, 0)
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self._raise_if_dead()
            answers = await asyncio.gather(*(client.is_answering() for client in self.clients))
            for client, answering in zip(self.clients, answers, strict=True):
                missed[client] = 0 if answering else missed[client] + 1
                if missed[client] >= _MISSED_ANSWERS:
                    raise RolloutServerDied(f"{client.url}: nothing answers there any more; is the server running?")

    async def close(self) -> None:
        await self._session.close()

    def _raise_if_dead(self) -> None:
        message = self._find_dead()
        if message is not None:
            raise RolloutServerDied(message)


async def _reset(client: SGLangClient) -> None:
    undo: list[tuple[str, dict[str, Any]]] = [
        ("/end_weight_update", {}),
        ("/continue_generation", {}),
    ]
    for path, body in undo:
        try:
            await client.post(path, body, timeout_seconds=10.0)
        except RolloutError as error:
            # 400 is the answer where there is nothing to undo.
            logger.debug("reset: %s", error)

"""What tests of the fleet share: two scripted servers, and pools that are closed at the end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest_asyncio

from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import GenerateResponse
from tests.support.scripted_server import FAST, REQUEST, ScriptedServer


class Pair:
    """Two servers that hold version 0, and pools of them."""

    def __init__(self, first: ScriptedServer, second: ScriptedServer, stack: AsyncExitStack) -> None:
        self.first, self.second, self._stack = first, second, stack
        self.servers = first, second

    def connect(self, *urls: str, version: int | None = 0, **options: Any) -> ServerPool:
        """urls: both servers' where none is given. version: is confirmed, as after a publication."""
        every = {"timeout_seconds": 5.0, "timings": FAST}
        pool = ServerPool(list(urls or (self.first.url, self.second.url)), **(every | options))
        self._stack.push_async_callback(pool.close)
        if version is not None:
            pool.membership.confirm(version)
        return pool


@asynccontextmanager
async def pair_of_servers() -> AsyncIterator[Pair]:
    async with ScriptedServer(version="0") as first, ScriptedServer(version="0") as second, AsyncExitStack() as stack:
        yield Pair(first, second, stack)


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    async with pair_of_servers() as pair:
        yield pair


def quarantined(pool: ServerPool) -> list[str]:
    return [server.url for server in pool.membership.quarantined]


async def sample(pool: ServerPool, number: int) -> list[GenerateResponse]:
    """Responses to so many requests at one time."""
    answers = await asyncio.wait_for(asyncio.gather(*(pool.generate(REQUEST) for _ in range(number))), 60.0)
    return [response for responses in answers for response in responses]

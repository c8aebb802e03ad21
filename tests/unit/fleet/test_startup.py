"""The start of a run while servers are busy, refuse, or belong to another run: only `min_servers` decides its end."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
import pytest_asyncio

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.timings import LeaseTimings
from megatron_a3po.runtime import waiting
from tests.support.deadlines import scaled
from tests.support.scripted_server import DEADLINE_SECONDS, FAST, PROMPT_SECONDS, Action, ScriptedServer, hang, refuse
from tests.unit.rollout.test_collector import wait_until

TIMES = LeaseTimings(lease_seconds=2.0, retry_seconds=0.02, call_seconds=0.2)


@pytest_asyncio.fixture
async def servers() -> AsyncIterator[list[ScriptedServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ScriptedServer(version="0")) for _ in range(2)]


@asynccontextmanager
async def pool_of(
    servers: list[ScriptedServer], min_servers: int | None = None, lease: LeaseTimings = TIMES
) -> AsyncIterator[ServerPool]:
    timings = replace(FAST, reset_seconds=0.2, lease=lease)
    urls = [server.url for server in servers]
    pool = ServerPool(urls, timeout_seconds=5.0, min_servers=min_servers, timings=timings)
    try:
        yield pool
    finally:
        await pool.close()


@pytest.mark.parametrize("late_seconds", [0.2, 60.0])
async def test_a_server_whose_scheduler_is_busy_is_waited_for(
    servers: list[ScriptedServer], late_seconds: float
) -> None:
    servers[1].scheduler_is_free.clear()
    async with pool_of(servers, lease=replace(TIMES, late_seconds=late_seconds)) as pool:
        ready = asyncio.create_task(pool.wait_ready(DEADLINE_SECONDS))
        await asyncio.sleep(1.0)
        assert not ready.done() and pool.membership.servers[0].lease.is_held
        servers[1].scheduler_is_free.set()
        assert len(await ready) == 2
        assert all(server.lease.is_held for server in pool.membership.servers)


@pytest.mark.parametrize(
    ("path", "action"),
    [
        ("/model_info", refuse(503, "loading")),
        ("/open_session", hang),
        ("/open_session", refuse(503, "busy")),
        ("/end_weight_update", hang),
        ("/ready", refuse(503, "loading")),
        ("/server_info", refuse(503, "busy")),
    ],
)
async def test_what_is_not_ready_in_time_is_left_out_with_what_it_lacked(
    servers: list[ScriptedServer], path: str, action: Action
) -> None:
    servers[1].script(path, action)
    async with pool_of(servers, 1) as pool:
        assert len(await pool.wait_ready(scaled(1.0))) == 1
        (out,) = pool.membership.quarantined
        assert out.url == servers[1].url
        assert f"{out.url}: not ready within {scaled(1.0):g} s ({out.url}{path} " in str(out.error)
        assert "rollout.start_timeout_seconds" in str(out.error)
    async with pool_of(servers) as pool:
        with pytest.raises(RolloutError, match=rf"{servers[1].url}{path} .*fewer than publish.min_servers = 2"):
            await pool.wait_ready(scaled(0.5))


async def test_a_server_of_another_run_is_left_out_long_before_the_timeout_where_the_others_are_enough(
    servers: list[ScriptedServer],
) -> None:
    async with asyncio.timeout(PROMPT_SECONDS), pool_of(servers[1:]) as other, pool_of(servers, 1) as pool:
        await other.wait_ready(DEADLINE_SECONDS)
        before = len(servers[1].calls)
        assert len(await pool.wait_ready(DEADLINE_SECONDS)) == 1
        (out,) = pool.membership.quarantined
        assert out.url == servers[1].url and "another run that is alive" in str(out.error)
        assert {path for path, _ in servers[1].calls[before:]} <= {"/open_session", "/close_session"}
        assert other.membership.servers[0].lease.is_held


async def test_while_it_lasts_it_is_told_who_is_waited_for_and_why(
    servers: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "REMIND_SECONDS", 0.3)
    servers[1].script("/server_info", refuse(503, "busy with a load"))

    def told() -> list[str]:
        return [text for text in map(logging.LogRecord.getMessage, caplog.records) if text.startswith("waiting for")]

    with caplog.at_level(logging.INFO):
        async with pool_of(servers, 1) as pool:
            ready = asyncio.create_task(pool.wait_ready(DEADLINE_SECONDS))
            await wait_until(lambda: any("busy with a load" in text for text in told()))
            assert f"waiting for {servers[1].url} ({servers[1].url}/server_info answered 503" in told()[-1]
            servers[1].script("/server_info", refuse(503, ""), range(0))
            assert len(await ready) == 2

"""The start of a run while servers are busy, refuse, or belong to another run: only `min_servers` decides its end."""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.timings import LeaseTimings
from megatron_a3po.runtime import waiting
from tests.support.deadlines import scaled
from tests.support.scripted_server import (
    DEADLINE_SECONDS,
    FAST,
    PROMPT_SECONDS,
    ScriptedServer,
    close_connection,
    hang,
    refuse,
)
from tests.unit.fleet.conftest import Pair, quarantined
from tests.unit.rollout.test_collector import wait_until

TIMES = LeaseTimings(lease_seconds=scaled(1.0), retry_seconds=0.02, call_seconds=0.2)


def connect(pair: Pair, *urls: str, min_servers: int | None = None, lease: LeaseTimings = TIMES) -> ServerPool:
    timings = replace(FAST, reset_seconds=0.2, lease=lease)
    return pair.connect(*urls, version=None, min_servers=min_servers, timings=timings)


@pytest.mark.parametrize("late_seconds", [0.2, 60.0])
async def test_a_server_whose_scheduler_is_busy_is_waited_for(pair: Pair, late_seconds: float) -> None:
    pair.second.scheduler_is_free.clear()
    pool = connect(pair, lease=replace(TIMES, late_seconds=late_seconds))
    ready = asyncio.create_task(pool.wait_ready(DEADLINE_SECONDS))
    await asyncio.sleep(0.6)
    assert not ready.done() and pool.membership.servers[0].lease.is_held
    pair.second.scheduler_is_free.set()
    assert len(await ready) == 2
    assert all(server.lease.is_held for server in pool.membership.servers)


LACKING = [
    ("/model_info", refuse(503, "loading")),
    ("/model_info", close_connection),
    ("/open_session", hang),
    ("/open_session", refuse(503, "busy")),
    ("/end_weight_update", hang),
    ("/ready", refuse(503, "loading")),
    ("/server_info", refuse(503, "busy")),
]


async def test_what_is_not_ready_in_time_is_left_out_with_what_it_lacked(pair: Pair) -> None:
    async with AsyncExitStack() as stack:
        lacking: dict[str, str] = {}
        for path, action in LACKING:
            server = await stack.enter_async_context(ScriptedServer())
            server.script(path, action)
            lacking[server.url] = path
        pool, seconds = connect(pair, pair.first.url, *lacking, min_servers=1), scaled(1.0)
        assert len(await pool.wait_ready(seconds)) == 1
    assert sorted(quarantined(pool)) == sorted(lacking)
    for out in pool.membership.quarantined:
        assert f"{out.url}: not ready within {seconds:g} s ({out.url}{lacking[out.url]}" in str(out.error)
        assert "rollout.start_timeout_seconds" in str(out.error)

    pair.second.script("/ready", refuse(503, "loading"))
    with pytest.raises(RolloutError, match=f"{pair.second.url}/ready"):
        await connect(pair, pair.second.url).wait_ready(scaled(0.2))


async def test_a_server_of_another_run_is_left_out_long_before_the_timeout_if_others_are_enough(pair: Pair) -> None:
    other, pool = connect(pair, pair.second.url), connect(pair, min_servers=1)
    async with asyncio.timeout(PROMPT_SECONDS):
        await other.wait_ready(DEADLINE_SECONDS)
        before = len(pair.second.calls)
        assert len(await pool.wait_ready(DEADLINE_SECONDS)) == 1
    assert quarantined(pool) == [pair.second.url]
    assert "another run that is alive" in str(pool.membership.quarantined[0].error)
    assert {path for path, _ in pair.second.calls[before:]} <= {"/open_session", "/close_session"}
    assert other.membership.servers[0].lease.is_held


async def test_while_it_lasts_it_is_told_who_is_waited_for_and_why(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "REMIND_SECONDS", 0.3)
    pair.second.script("/server_info", refuse(503, "busy with a load"))

    def told() -> list[str]:
        return [text for text in map(logging.LogRecord.getMessage, caplog.records) if text.startswith("waiting for")]

    with caplog.at_level(logging.INFO):
        ready = asyncio.create_task(connect(pair, min_servers=1).wait_ready(DEADLINE_SECONDS))
        await wait_until(lambda: any("busy with a load" in text for text in told()))
        url = pair.second.url
        assert f"waiting for {url} ({url}/server_info answered 503" in told()[-1]
        pair.second.script("/server_info", refuse(503, ""), range(0))
        assert len(await ready) == 2

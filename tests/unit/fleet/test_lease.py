"""Of two runs that want one server, the second is refused while the first lives, and has it soon after."""

import asyncio
import gc
import time
from dataclasses import replace

import pytest
from aiohttp import web

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet import lease as lease_module
from megatron_a3po.fleet import recovery
from megatron_a3po.fleet.lease import Lease
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import labelled_version, version_label
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.fleet.timings import LeaseTimings
from tests.support.deadlines import scaled
from tests.support.scripted_server import FAST, REQUEST, Json, ScriptedServer, answer, close_connection, response
from tests.unit.fleet.conftest import Pair, pair_of_servers, quarantined, sample
from tests.unit.rollout.test_collector import wait_until

LEASE_SECONDS = scaled(0.8)
"""A busy machine may sleep through a part of it."""
TIMES = LeaseTimings(lease_seconds=LEASE_SECONDS, retry_seconds=0.02)
FIRST, SECOND = "/runs/first (host a, process 1)", "/runs/second (host b, process 2)"
SESSIONS = {"/open_session", "/close_session"}


async def start(pair: Pair, run: str = FIRST, *urls: str, min_servers: int | None = None, **times: float) -> ServerPool:
    """Start a run on the first server, or on those."""
    timings = replace(FAST, lease=replace(TIMES, **times))
    urls = urls or (pair.first.url,)
    pool = pair.connect(*urls, version=None, run=run, min_servers=min_servers, timings=timings)
    await asyncio.wait_for(pool.wait_ready(60.0), 60.0)
    return pool


async def start_on_both(pair: Pair, **times: float) -> ServerPool:
    """Start a run that needs one of its two servers, and publish version 3."""
    pool = await start(pair, FIRST, pair.first.url, pair.second.url, min_servers=1, **times)
    for server in pair.servers:
        publish(pool, server, 3)
    return pool


def publish(pool: ServerPool, server: ScriptedServer, version: int) -> None:
    server.version = version_label(version, pool.run)
    pool.membership.confirm(version)


def die(pool: ServerPool) -> None:
    """As a process does: nothing is said to the server any more."""
    for server in pool.membership.servers:
        assert server.lease._renewal is not None
        server.lease._renewal.cancel()
        server.lease._renewal = None


def stand_still(pool: ServerPool, *servers: ScriptedServer) -> None:
    """As a process does that gets no time for longer than a lease: at the servers, its sessions have ended."""
    for server in pool.membership.servers:
        server.lease._opened -= LEASE_SECONDS
    for scripted in servers:
        scripted.sessions.clear()


async def test_a_second_run_is_refused_with_the_remedy_and_changes_nothing_until_the_first_ends(pair: Pair) -> None:
    first = await start(pair)
    publish(first, pair.first, 17)
    before = len(pair.first.calls)
    message = rf"{pair.first.url}.*another run.*version 17 of /runs/first \(host a, process 1\).*`rollout\.servers`"
    with pytest.raises(RolloutError, match=message):
        await start(pair, SECOND)
    assert {path for path, _ in pair.first.calls[before:]} <= SESSIONS

    await first.close()
    assert pair.first.sessions == {}
    before = len(pair.first.bodies("/open_session"))
    await start(pair, SECOND)
    assert len(pair.first.bodies("/open_session")) == before + 2, "it waits for nothing"


async def test_a_run_has_its_server_for_as_long_as_it_lives(pair: Pair) -> None:
    first = await start(pair)
    other = Lease(first.clients[0], TIMES)
    number = int(2.5 * LEASE_SECONDS / 0.03)
    for _ in range(number):
        assert not await other.take()
        await asyncio.sleep(0.03)
    assert first.membership.servers[0].lease.is_held
    assert len(pair.first.bodies("/open_session")) >= number


async def test_the_server_of_a_run_that_died_is_free_a_little_later(pair: Pair) -> None:
    first = await start(pair)
    publish(first, pair.first, 17)
    await asyncio.sleep(LEASE_SECONDS)
    die(first)
    second = await start(pair, SECOND)
    publish(second, pair.first, 0)
    assert second.membership.servers[0].lease.is_held
    assert labelled_version((await second.generate(REQUEST))[0].meta_info.weight_versions[0].version) == 0


async def test_of_runs_that_start_at_one_time_one_gets_the_server(pair: Pair) -> None:
    started = await asyncio.gather(*(start(pair, str(number)) for number in range(4)), return_exceptions=True)
    assert sorted(isinstance(item, ServerPool) for item in started) == [False, False, False, True]
    assert all(isinstance(item, ServerPool | RolloutError) for item in started)


async def test_a_run_that_stood_still_longer_than_a_lease_does_not_take_its_server_back_from_another(
    pair: Pair,
) -> None:
    first = await start(pair)
    lease, other = first.membership.servers[0].lease, Lease(first.clients[0], TIMES)
    stand_still(first, pair.first)
    assert await other.take()
    async with asyncio.timeout(60.0):
        while not lease.is_lost:
            assert other.is_held and not lease.is_held and not await lease.take()
            await asyncio.sleep(0.03)
    assert other.is_held and not await lease.take()
    await other.release()


async def test_a_run_keeps_its_server_whose_scheduler_was_busy_or_that_lost_its_calls() -> None:
    """Of calls that the run has given up, the sessions are opened all the same, and stand in its own way."""

    async def keep(num_leases: float, late_seconds: float, *, is_busy: bool) -> None:
        async with pair_of_servers() as pair:
            run = await start_on_both(pair, call_seconds=0.2, late_seconds=late_seconds)
            lease, watch = run.membership.servers[0].lease, asyncio.create_task(run.watch())
            if is_busy:
                pair.first.scheduler_is_free.clear()
            else:
                pair.first.script("/open_session", close_connection)
            await asyncio.sleep(num_leases * LEASE_SECONDS)
            pair.first.scheduler_is_free.set()
            pair.first.script("/open_session", close_connection, range(0))
            await asyncio.sleep(1.5 * LEASE_SECONDS)
            await wait_until(lambda: lease.is_held)
            assert max(pair.first.sessions.values()) > asyncio.get_running_loop().time()
            assert quarantined(run) == [] and not watch.done()
            watch.cancel()

    busy = [keep(number, late, is_busy=True) for number in (0.9, 3.0) for late in (0.2, 60.0)]
    await asyncio.gather(*busy, keep(2.0, 60.0, is_busy=False))


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_server_that_another_run_has_taken_is_left_out_until_that_run_ends(pair: Pair, is_busy: bool) -> None:
    """Also where the scheduler was busy meanwhile."""
    run = await start_on_both(pair, call_seconds=0.2 if is_busy else TIMES.call_seconds)
    watch = asyncio.create_task(run.watch())
    if is_busy:
        pair.first.scheduler_is_free.clear()
        await asyncio.sleep(LEASE_SECONDS)
    pair.first.sessions = dict.fromkeys(lease_module._SESSIONS, float("inf"))
    pair.first.scheduler_is_free.set()
    await wait_until(lambda: quarantined(run) == [pair.first.url])
    assert "another run that is alive" in str(run.membership.quarantined[0].error)

    await recovery.call_back(run, at_once=True)
    assert quarantined(run) == [pair.first.url]
    pair.first.sessions.clear()
    await recovery.call_back(run, at_once=True)
    assert quarantined(run) == [] and run.membership.servers[0].lease.is_held
    watch.cancel()


async def test_a_lease_says_when_the_scheduler_has_last_answered(pair: Pair) -> None:
    before = time.monotonic()
    run = await start(pair, call_seconds=0.2)
    lease, other = run.membership.servers[0].lease, Lease(run.clients[0], replace(TIMES, call_seconds=0.2))
    assert before < lease.last_answer < time.monotonic() and other.last_answer < before

    before = time.monotonic()
    assert not await other.take()
    assert before < other.last_answer < time.monotonic()

    pair.first.scheduler_is_free.clear()
    silent = time.monotonic()
    for _ in range(3):
        with pytest.raises(RolloutError, match="gave no answer"):
            await other.take()
    assert max(lease.last_answer, other.last_answer) < silent
    pair.first.scheduler_is_free.set()
    await wait_until(lambda: lease.last_answer > silent)


async def test_a_session_that_was_opened_late_is_given_back(pair: Pair) -> None:
    first, server = await start(pair), pair.first
    lease = first.membership.servers[0].lease
    opened: list[str] = []

    async def open_late(_: web.Request, body: Json) -> web.StreamResponse:
        stand_still(first, server)
        opened.append(body["session_id"])
        return await server._open_session(body)

    number = len(server.bodies("/open_session")) + 1
    server.script("/open_session", open_late, range(number, number + 1))
    await wait_until(lambda: bool(opened))
    await wait_until(lambda: lease.is_held)
    assert {"session_id": opened[0]} == server.bodies("/close_session")[1]


async def test_before_a_publication_a_run_that_stood_still_takes_its_server_anew_or_leaves_it_out(pair: Pair) -> None:
    run = await start_on_both(pair)
    leases = [one.lease for one in run.membership.servers]
    fleet = Fleet(run, None, timeout_seconds=5.0)  # type: ignore[arg-type]
    other = Lease(run.clients[0], TIMES)
    stand_still(run, *pair.servers)
    assert await other.take()
    before = len(pair.first.calls)
    await fleet._settle_members("none")
    assert quarantined(run) == [pair.first.url]
    assert "another run that is alive" in str(run.membership.quarantined[0].error)
    assert [lease.is_held for lease in leases] == [False, True] and other.is_held
    assert {path for path, _ in pair.first.calls[before:]} <= SESSIONS
    await other.release()


@pytest.mark.parametrize("is_free_in_time", [True, False])
async def test_before_a_publication_a_server_whose_scheduler_is_busy_has_the_time_of_a_call(
    pair: Pair, caplog: pytest.LogCaptureFixture, is_free_in_time: bool
) -> None:
    run = await start_on_both(pair, call_seconds=0.2)
    lease = run.membership.servers[0].lease
    fleet = Fleet(run, None, timeout_seconds=60.0 if is_free_in_time else 0.5)  # type: ignore[arg-type]
    pair.first.scheduler_is_free.clear()
    lease._opened -= LEASE_SECONDS
    settle_members = asyncio.create_task(fleet._settle_members("none"))
    if is_free_in_time:
        await wait_until(lambda: "the publication waits for it" in caplog.text)
        await asyncio.sleep(0.5)
        assert not settle_members.done() and quarantined(run) == []
        pair.first.scheduler_is_free.set()
    await asyncio.wait_for(settle_members, 60.0)
    assert lease.is_held == is_free_in_time
    assert quarantined(run) == ([] if is_free_in_time else [pair.first.url])
    assert is_free_in_time or "publish.timeout_seconds = 0.5" in str(run.membership.quarantined[0].error)
    assert caplog.text.count("the publication waits for it") == 1
    pair.first.scheduler_is_free.set()


async def test_a_failed_call_that_was_given_up_leaves_no_trace_in_the_log(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.first.scheduler_is_free.clear()
    timings = replace(FAST, lease=LeaseTimings(call_seconds=0.05, late_seconds=0.1))
    lease = pair.connect(pair.first.url, timings=timings).membership.servers[0].lease
    with pytest.raises(RolloutError, match=r"gave no answer within 0\.05 s"):
        await lease.take()
    await wait_until(lambda: all(call.done() for call in lease._calls.values()))
    lease._calls.clear()
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_the_same_version_number_of_another_run_is_not_the_runs_own(pair: Pair) -> None:
    run = await start_on_both(pair)
    assert len(await sample(run, 4)) == 4
    # Between two looks at its label, tokens tell.
    foreign = response(num_tokens=4, versions=[version_label(3, SECOND)])
    pair.first.script("/generate", answer(foreign))
    await sample(run, 4)
    assert quarantined(run) == [pair.first.url]
    assert "weight version 3 of /runs/second" in str(run.membership.quarantined[0].error)


async def test_weights_that_another_run_has_published_are_found_by_the_watch(pair: Pair) -> None:
    run = await start(pair)
    publish(run, pair.first, 3)
    pair.first.version = version_label(3, SECOND)
    message = r"version 3 of /runs/second \(host b, process 2\) instead of 3 of /runs/first \(host a, process 1\)"
    with pytest.raises(RolloutError, match=message):
        await asyncio.wait_for(run.watch(), 60.0)


def test_a_label_says_version_and_run_and_a_label_that_no_run_has_given_is_no_version() -> None:
    assert labelled_version(version_label(12, FIRST)) == labelled_version(version_label(12, None)) == 12
    for label in ("default", "", "x 3", "3x of /runs/first", " of /runs/first"):
        assert labelled_version(label) is None

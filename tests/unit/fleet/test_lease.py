"""Of two runs that want one server, the second is refused while the first lives, and has it soon after."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
from aiohttp import web

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet import lease as lease_module
from megatron_a3po.fleet import recovery
from megatron_a3po.fleet.lease import Lease
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import generate_request, labelled_version, version_label
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.fleet.timings import LeaseTimings
from tests.support.deadlines import scaled
from tests.support.scripted_server import FAST, Json, ScriptedServer, answer, close_connection, response
from tests.unit.rollout.test_collector import wait_until

REQUEST = generate_request([1, 2, 3], num_samples=1, max_new_tokens=4, temperature=1.0, priority=0)
LEASE_SECONDS = scaled(0.8)
"""A busy machine may sleep through a part of it."""
TIMES = LeaseTimings(lease_seconds=LEASE_SECONDS, retry_seconds=0.02)
FIRST, SECOND = "/runs/first (host a, process 1)", "/runs/second (host b, process 2)"
StartRun = Callable[..., Awaitable[ServerPool]]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer() as server:
        yield server


@pytest_asyncio.fixture
async def start(server: ScriptedServer) -> AsyncIterator[StartRun]:
    pools: list[ServerPool] = []

    async def start(run: str, *urls: str, min_servers: int | None = None, **times: float) -> ServerPool:
        timings = replace(FAST, lease=replace(TIMES, **times))
        pools.append(
            ServerPool([server.url, *urls], timeout_seconds=5.0, run=run, min_servers=min_servers, timings=timings)
        )
        await asyncio.wait_for(pools[-1].wait_ready(60.0), 60.0)
        return pools[-1]

    yield start
    for pool in pools:
        await pool.close()


def publish(pool: ServerPool, server: ScriptedServer, version: int) -> None:
    server.version = version_label(version, pool.run)
    pool.membership.confirm(version)


def die(pool: ServerPool) -> None:
    """As a process does: nothing is said to the server any more."""
    for server in pool.membership.servers:
        assert server.lease._keeper is not None
        server.lease._keeper.cancel()
        server.lease._keeper = None


def stand_still(pool: ServerPool, *servers: ScriptedServer) -> None:
    """As a process does that gets no time for longer than a lease: at the servers, its sessions have ended."""
    for server in pool.membership.servers:
        server.lease._opened -= LEASE_SECONDS
    for scripted in servers:
        scripted.sessions.clear()


async def test_a_second_run_is_refused_with_server_run_and_remedy_and_changes_nothing_there(
    start: StartRun, server: ScriptedServer
) -> None:
    publish(await start(FIRST), server, 17)
    before = len(server.calls)

    message = rf"{server.url}.*another run.*version 17 of /runs/first \(host a, process 1\).*`rollout\.servers`"
    with pytest.raises(RolloutError, match=message):
        await start(SECOND)

    assert {path for path, _ in server.calls[before:]} <= {"/open_session", "/close_session"}


async def test_a_run_has_its_server_for_as_long_as_it_lives(start: StartRun, server: ScriptedServer) -> None:
    first = await start(FIRST)
    other = Lease(first.clients[0], TIMES)
    for _ in range(int(2.5 * LEASE_SECONDS / 0.03)):
        assert not await other.take()
        await asyncio.sleep(0.03)
    assert first.membership.servers[0].lease.is_held
    assert len(server.bodies("/open_session")) >= int(2.5 * LEASE_SECONDS / 0.03)


async def test_the_server_of_a_run_that_died_is_free_a_little_later(start: StartRun, server: ScriptedServer) -> None:
    first = await start(FIRST)
    publish(first, server, 17)
    await asyncio.sleep(LEASE_SECONDS)
    die(first)

    second = await start(SECOND)
    publish(second, server, 0)

    assert second.membership.servers[0].lease.is_held
    assert labelled_version((await second.generate(REQUEST))[0].meta_info.weight_versions[0].version) == 0


async def test_the_server_of_a_run_that_ended_is_free_at_once(start: StartRun, server: ScriptedServer) -> None:
    await (await start(FIRST)).close()
    assert server.sessions == {}
    before = len(server.bodies("/open_session"))
    await start(SECOND)
    assert len(server.bodies("/open_session")) == before + 2


async def test_of_runs_that_start_at_one_time_one_gets_the_server(start: StartRun) -> None:
    started = await asyncio.gather(*(start(str(number)) for number in range(4)), return_exceptions=True)
    assert sorted(isinstance(item, ServerPool) for item in started) == [False, False, False, True]
    assert all(isinstance(item, ServerPool | RolloutError) for item in started)


async def test_without_an_answer_for_a_while_a_run_keeps_its_server(start: StartRun, server: ScriptedServer) -> None:
    lease = (await start(FIRST)).membership.servers[0].lease
    server.script("/open_session", close_connection)
    await asyncio.sleep(2 * LEASE_SECONDS)
    server.script("/open_session", close_connection, range(0))
    await wait_until(lambda: lease.is_held)
    assert max(server.sessions.values()) > asyncio.get_running_loop().time()


async def test_a_run_that_stood_still_for_longer_than_a_lease_does_not_take_its_server_back_from_another(
    start: StartRun, server: ScriptedServer
) -> None:
    first = await start(FIRST)
    lease, other = first.membership.servers[0].lease, Lease(first.clients[0], TIMES)
    stand_still(first, server)
    assert await other.take()
    for _ in range(int(2.5 * LEASE_SECONDS / 0.03)):
        assert other.is_held and not lease.is_held and not await lease.take()
        await asyncio.sleep(0.03)
    assert lease.is_lost
    await other.release()


@pytest.mark.parametrize("late_seconds", [0.2, 60.0])
@pytest.mark.parametrize("num_leases", [0.9, 3.0])
async def test_a_run_keeps_its_server_whose_scheduler_was_busy(
    start: StartRun, server: ScriptedServer, num_leases: float, late_seconds: float
) -> None:
    """Of calls that it has given up, the sessions are opened all the same, and stand in its own way."""
    async with ScriptedServer() as lonely:
        run = await start(FIRST, lonely.url, min_servers=1, call_seconds=0.2, late_seconds=late_seconds)
        for one in (server, lonely):
            publish(run, one, 3)
        lease = run.membership.servers[0].lease
        watch = asyncio.create_task(run.watch())
        server.scheduler_is_free.clear()
        await asyncio.sleep(num_leases * LEASE_SECONDS)
        server.scheduler_is_free.set()
        await asyncio.sleep(1.5 * LEASE_SECONDS)
        await wait_until(lambda: lease.is_held)
        assert run.membership.quarantined == [] and not watch.done()
        watch.cancel()


async def test_a_run_that_took_a_server_while_its_scheduler_was_busy_is_found_soon_after(
    start: StartRun, server: ScriptedServer
) -> None:
    async with ScriptedServer() as lonely:
        run = await start(FIRST, lonely.url, min_servers=1, call_seconds=0.2)
        for one in (server, lonely):
            publish(run, one, 3)
        watch = asyncio.create_task(run.watch())
        server.scheduler_is_free.clear()
        await asyncio.sleep(LEASE_SECONDS)
        server.sessions = dict.fromkeys(lease_module._SESSIONS, float("inf"))
        server.scheduler_is_free.set()
        await wait_until(lambda: [out.url for out in run.membership.quarantined] == [server.url])
        assert "another run that is alive" in str(run.membership.quarantined[0].error)
        watch.cancel()


async def test_a_lease_says_when_the_scheduler_has_last_answered(start: StartRun, server: ScriptedServer) -> None:
    before = time.monotonic()
    run = await start(FIRST, call_seconds=0.2)
    lease, other = run.membership.servers[0].lease, Lease(run.clients[0], replace(TIMES, call_seconds=0.2))
    assert before < lease.last_answer < time.monotonic() and other.last_answer < before

    before = time.monotonic()
    assert not await other.take()
    assert before < other.last_answer < time.monotonic()

    server.scheduler_is_free.clear()
    silent = time.monotonic()
    for _ in range(3):
        with pytest.raises(RolloutError, match="gave no answer"):
            await other.take()
    assert max(lease.last_answer, other.last_answer) < silent
    server.scheduler_is_free.set()
    await wait_until(lambda: lease.last_answer > silent)


async def test_a_session_that_was_opened_late_is_given_back(start: StartRun, server: ScriptedServer) -> None:
    first = await start(FIRST)
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


async def test_before_a_publication_a_run_that_stood_still_takes_its_server_anew_or_leaves_it_out(
    start: StartRun, server: ScriptedServer
) -> None:
    async with ScriptedServer() as lonely:
        run = await start(FIRST, lonely.url, min_servers=1)
        leases = [one.lease for one in run.membership.servers]
        fleet = Fleet(run, None, timeout_seconds=5.0)  # type: ignore[arg-type]
        other = Lease(run.clients[0], TIMES)
        stand_still(run, server, lonely)
        assert await other.take()
        before = len(server.calls)
        await fleet._settle_members("none")
        assert [out.url for out in run.membership.quarantined] == [server.url]
        assert "another run that is alive" in str(run.membership.quarantined[0].error)
        assert [lease.is_held for lease in leases] == [False, True] and other.is_held
        assert {path for path, _ in server.calls[before:]} <= {"/open_session", "/close_session"}
        await other.release()


@pytest.mark.parametrize("is_free_in_time", [True, False])
async def test_before_a_publication_a_server_whose_scheduler_is_busy_has_the_time_of_a_call(
    start: StartRun,
    server: ScriptedServer,
    caplog: pytest.LogCaptureFixture,
    is_free_in_time: bool,
) -> None:
    async with ScriptedServer() as lonely:
        run = await start(FIRST, lonely.url, min_servers=1, call_seconds=0.2)
        lease = run.membership.servers[0].lease
        fleet = Fleet(run, None, timeout_seconds=60.0 if is_free_in_time else 0.5)  # type: ignore[arg-type]
        server.scheduler_is_free.clear()
        lease._opened -= LEASE_SECONDS
        settle_members = asyncio.create_task(fleet._settle_members("none"))
        if is_free_in_time:
            await wait_until(lambda: "the publication waits for it" in caplog.text)
            await asyncio.sleep(0.5)
            assert not settle_members.done() and run.membership.quarantined == []
            server.scheduler_is_free.set()
        await asyncio.wait_for(settle_members, 60.0)
        assert lease.is_held == is_free_in_time
        assert [out.url for out in run.membership.quarantined] == ([] if is_free_in_time else [server.url])
        assert is_free_in_time or "publish.timeout_seconds = 0.5" in str(run.membership.quarantined[0].error)
        assert caplog.text.count("the publication waits for it") == 1
        server.scheduler_is_free.set()


async def test_a_call_that_failed_after_it_was_given_up_leaves_no_trace_in_the_log(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.scheduler_is_free.clear()
    timings = replace(FAST, lease=LeaseTimings(call_seconds=0.05, late_seconds=0.1))
    pool = ServerPool([server.url], timeout_seconds=5.0, timings=timings)
    lease = pool.membership.servers[0].lease
    with pytest.raises(RolloutError, match=r"gave no answer within 0\.05 s"):
        await lease.take()
    await wait_until(lambda: all(call.done() for call in lease._calls.values()))
    lease._calls.clear()
    gc.collect()
    assert "never retrieved" not in caplog.text
    await pool.close()


async def test_a_server_that_another_run_has_taken_is_left_out_until_that_run_ends(
    start: StartRun, server: ScriptedServer
) -> None:
    async with ScriptedServer() as lonely:
        run = await start(FIRST, lonely.url, min_servers=1)
        for one in (server, lonely):
            publish(run, one, 3)
        watch = asyncio.create_task(run.watch())
        server.sessions = dict.fromkeys(lease_module._SESSIONS, float("inf"))
        await wait_until(lambda: [out.url for out in run.membership.quarantined] == [server.url])
        assert "another run that is alive" in str(run.membership.quarantined[0].error)

        await recovery.call_back(run, at_once=True)
        assert [out.url for out in run.membership.quarantined] == [server.url]
        server.sessions.clear()
        await recovery.call_back(run, at_once=True)
        assert run.membership.quarantined == [] and run.membership.servers[0].lease.is_held
        watch.cancel()


async def test_the_same_version_number_of_another_run_is_not_the_runs_own(
    start: StartRun, server: ScriptedServer
) -> None:
    async with ScriptedServer() as lonely:
        run = await start(FIRST, lonely.url, min_servers=1)
        for one in (server, lonely):
            publish(run, one, 3)
        assert len([await run.generate(REQUEST) for _ in range(4)]) == 4
        # Between two looks at its label, tokens tell.
        foreign = response(num_tokens=4, versions=[version_label(3, SECOND)])
        server.script("/generate", answer(foreign))
        await asyncio.gather(*(run.generate(REQUEST) for _ in range(4)))
        assert [out.url for out in run.membership.quarantined] == [server.url]
        assert "weight version 3 of /runs/second" in str(run.membership.quarantined[0].error)


async def test_weights_that_another_run_has_published_are_found_by_the_watch(
    start: StartRun, server: ScriptedServer
) -> None:
    run = await start(FIRST)
    publish(run, server, 3)
    server.version = version_label(3, SECOND)
    message = r"version 3 of /runs/second \(host b, process 2\) instead of 3 of /runs/first \(host a, process 1\)"
    with pytest.raises(RolloutError, match=message):
        await asyncio.wait_for(run.watch(), 60.0)


@pytest.mark.parametrize("label", ["default", "", "x 3", "3x of /runs/first", " of /runs/first"])
def test_a_label_that_no_run_has_given_is_no_version(label: str) -> None:
    assert labelled_version(label) is None


def test_a_label_says_version_and_run() -> None:
    assert labelled_version(version_label(12, FIRST)) == labelled_version(version_label(12, None)) == 12

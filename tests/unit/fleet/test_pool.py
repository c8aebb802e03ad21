"""Calls to rollout servers: where they go, which failures are tried again, and what the error says."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import pytest_asyncio
from aiohttp import web

from megatron_a3po.errors import RolloutError, RolloutServerDied
from megatron_a3po.fleet import recovery
from megatron_a3po.fleet.event_loop import EventLoopThread
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import generate_request
from megatron_a3po.fleet.timings import FleetTimings
from tests.support.scripted_server import (
    DEADLINE_SECONDS,
    FAST,
    PROMPT_SECONDS,
    Action,
    Json,
    ScriptedServer,
    answer,
    answer_text,
    close_connection,
    hang,
    refuse,
    success,
)

REQUEST = generate_request([1, 2, 3], num_samples=1, max_new_tokens=4, temperature=1.0, priority=0)
StartPool = Callable[..., Awaitable[ServerPool]]


@pytest_asyncio.fixture
async def servers() -> AsyncIterator[list[ScriptedServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ScriptedServer(version="0")) for _ in range(2)]


@pytest_asyncio.fixture
async def start_pool() -> AsyncIterator[StartPool]:
    pools = []

    async def start(
        *urls: str,
        timeout_seconds: float = 30.0,
        find_dead: Callable[[], str | None] = lambda: None,
        timings: FleetTimings = FAST,
    ) -> ServerPool:
        pools.append(ServerPool(list(urls), timeout_seconds=timeout_seconds, find_dead=find_dead, timings=timings))
        pools[-1].membership.confirm(0)  # as after a publication
        return pools[-1]

    yield start
    for pool in pools:
        await pool.close()


async def test_generation_goes_to_the_least_busy_server(servers: list[ScriptedServer], start_pool: StartPool) -> None:
    pool = await start_pool(*(server.url for server in servers))
    for server in servers:
        server.generation_seconds = lambda _: 0.1

    await asyncio.gather(*(pool.generate(REQUEST) for _ in range(8)))

    assert [len(server.bodies("/generate")) for server in servers] == [4, 4]
    assert [client.in_flight for client in pool.clients] == [0, 0]


async def test_one_busy_server_gets_nothing_while_another_is_free(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(*(server.url for server in servers))
    servers[0].script("/generate", hang)
    stuck = asyncio.create_task(pool.generate(REQUEST))
    await asyncio.sleep(0.05)

    for _ in range(3):
        await pool.generate(REQUEST)

    assert [len(server.bodies("/generate")) for server in servers] == [1, 3]
    stuck.cancel()


async def test_a_lost_connection_is_tried_again(servers: list[ScriptedServer], start_pool: StartPool) -> None:
    pool = await start_pool(servers[0].url)
    servers[0].script("/generate", close_connection, calls=range(1, 3))

    (response,) = await pool.generate(REQUEST)

    assert len(response.output_ids) == 4
    assert len(servers[0].bodies("/generate")) == 3


async def test_a_connection_that_is_lost_every_time_is_an_error(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(servers[0].url)
    servers[0].script("/generate", close_connection)

    with pytest.raises(RolloutServerDied, match=f"{servers[0].url}/generate: connection lost"):
        await pool.generate(REQUEST)


async def test_a_lost_connection_is_tried_again_on_another_server_though_the_dead_one_is_the_least_busy(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(*(server.url for server in servers))
    servers[0].script("/generate", close_connection)
    servers[1].generation_seconds = lambda _: 0.2

    await asyncio.gather(*(pool.generate(REQUEST) for _ in range(6)))

    assert len(servers[1].bodies("/generate")) == 6


@pytest.mark.parametrize("status", [400, 500])
async def test_a_refusal_is_not_tried_again_and_carries_the_servers_words(
    status: int, servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(servers[0].url)
    servers[0].script("/generate", refuse(status, "the input is longer than the context length"))

    with pytest.raises(RolloutError, match=f"{status}.*longer than the context length"):
        await pool.generate(REQUEST)

    assert len(servers[0].bodies("/generate")) == 1


async def test_the_only_server_of_a_run_that_falls_silent_is_an_error(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(servers[0].url, timeout_seconds=0.1)
    servers[0].script("/generate", hang)

    with pytest.raises(RolloutError, match=rf"{servers[0].url} has given no sign of life for 0\.1 s"):
        await pool.generate(REQUEST)
    assert pool.clients[0].in_flight == 0


@pytest.mark.parametrize(
    "action",
    [
        answer_text("{broken", "application/json"),
        answer_text("all is well", "text/plain"),
        answer({"output_ids": [1]}),
        answer({"output_ids": ["a"], "meta_info": {"finish_reason": {"type": "stop"}}}),
        answer({"output_ids": [], "meta_info": {"finish_reason": None}}),
        answer([None]),
    ],
    ids=["broken json", "text", "no metadata", "ids are no numbers", "no finish reason", "null"],
)
async def test_an_answer_that_is_not_a_response_is_a_rollout_error_naming_the_server(
    action: Action, servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(servers[0].url)
    servers[0].script("/generate", action)

    with pytest.raises(RolloutError, match=servers[0].url):
        await pool.generate(REQUEST)


async def test_a_dead_local_process_ends_a_request_without_further_attempts(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(servers[0].url, find_dead=lambda: "the server was killed by SIGKILL; its log is x.log")
    servers[0].script("/generate", close_connection)

    with pytest.raises(RolloutServerDied, match=r"killed by SIGKILL; its log is x\.log"):
        await pool.generate(REQUEST)
    assert len(servers[0].bodies("/generate")) == 1


async def test_a_dead_local_process_ends_the_watch_and_the_wait_at_once(start_pool: StartPool) -> None:
    pool = await start_pool("http://127.0.0.1:9", find_dead=lambda: "it ended with exit code 3")

    async with asyncio.timeout(PROMPT_SECONDS):
        with pytest.raises(RolloutServerDied, match="exit code 3"):
            await pool.watch()
        with pytest.raises(RolloutServerDied, match="exit code 3"):
            await pool.wait_ready(DEADLINE_SECONDS)


async def test_the_watch_raises_after_several_missed_answers_in_a_row(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(*(server.url for server in servers))
    # Four misses, an answer, then misses only.
    servers[1].script("/model_info", refuse(500, "busy"), calls=range(1, 5))
    watch = asyncio.create_task(pool.watch())
    await asyncio.sleep(0.4)
    assert not watch.done()

    servers[1].script("/model_info", close_connection)

    with pytest.raises(RolloutServerDied, match=servers[1].url):
        await asyncio.wait_for(watch, PROMPT_SECONDS)


async def test_the_watch_goes_on_while_generation_is_paused(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(servers[0].url)
    await pool.post_to_all("/pause_generation", {"mode": "retract"})

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pool.watch(), 0.4)


async def test_waiting_ends_with_the_servers_description_once_all_are_ready(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(*(server.url for server in servers))
    servers[1].script("/ready", refuse(503, "loading"), calls=range(1, 2))

    infos = await pool.wait_ready(DEADLINE_SECONDS)

    assert [info.tp_size for info in infos] == [1, 1]
    assert infos[0].enable_priority_scheduling


async def test_a_server_that_does_not_become_ready_is_an_error_with_its_url_and_a_remedy(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(servers[0].url)
    servers[0].script("/ready", refuse(503, "loading"))

    with pytest.raises(RolloutError, match=rf"{servers[0].url}.*0\.3 s.*rollout\.start_timeout_seconds"):
        await pool.wait_ready(0.3)


async def test_a_server_info_that_says_nothing_useful_is_a_rollout_error(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(servers[0].url)
    servers[0].script("/server_info", answer([]))

    with pytest.raises(RolloutError, match="/server_info"):
        await pool.wait_ready(3.0)


async def test_one_refusing_server_fails_the_call_to_all(servers: list[ScriptedServer], start_pool: StartPool) -> None:
    pool = await start_pool(*(server.url for server in servers))
    servers[1].script("/begin_weight_update", refuse(400, "a session is open"))

    with pytest.raises(RolloutError, match=f"{servers[1].url}.*a session is open"):
        await pool.post_to_all("/begin_weight_update", {})
    assert servers[0].paths() == ["/begin_weight_update"]


async def test_a_refusal_is_reported_at_once_though_another_server_hangs(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(*(server.url for server in servers), timeout_seconds=DEADLINE_SECONDS)
    servers[0].script("/begin_weight_update", hang)
    servers[1].script("/begin_weight_update", refuse(400, "a session is open"))

    async with asyncio.timeout(PROMPT_SECONDS):
        with pytest.raises(RolloutError, match="a session is open"):
            await pool.post_to_all("/begin_weight_update", {})


async def test_reset_ignores_servers_that_have_nothing_to_undo(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(*(server.url for server in servers))
    servers[0].script("/end_weight_update", refuse(400, "no session"))

    await asyncio.gather(*map(pool.reset, pool.membership.members))

    for server in servers:
        assert server.paths() == ["/abort_request", "/end_weight_update", "/continue_generation"]


async def test_reset_undoes_in_order_at_a_slow_server_though_another_has_nothing_to_undo(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(*(server.url for server in servers))
    ended: list[float] = []

    async def end_slowly(*_: object) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        ended.append(time.monotonic())
        return success()

    resumed: list[float] = []

    async def resume(*_: object) -> web.StreamResponse:
        resumed.append(time.monotonic())
        return success()

    servers[0].script("/end_weight_update", refuse(400, "no session"))
    servers[1].script("/end_weight_update", end_slowly)
    servers[1].script("/continue_generation", resume)

    await asyncio.gather(*map(pool.reset, pool.membership.members))

    assert ended[0] < resumed[0]


async def test_a_request_after_a_long_idle_time_does_not_use_a_connection_that_the_server_is_closing(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    assert FleetTimings().keep_alive_seconds < 5.0, "an SGLang server closes idle connections after 5 s"
    pool = await start_pool(servers[0].url, timings=replace(FAST, keep_alive_seconds=0.3))
    client_ports: list[int] = []

    async def note_port(request: web.Request, _: Json) -> web.StreamResponse:
        assert request.transport is not None
        client_ports.append(request.transport.get_extra_info("peername")[1])
        return success()

    servers[0].script("/end_weight_update", note_port)
    for pause in (0.0, 0.0, 0.6):
        await asyncio.sleep(pause)
        await pool.post_to_all("/end_weight_update", {})

    assert client_ports[0] == client_ports[1] != client_ports[2]


def test_a_closed_event_loop_refuses_work_instead_of_letting_the_caller_wait() -> None:
    loop = EventLoopThread()
    loop.close()

    work = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(work)
    work.close()


def test_closing_the_event_loop_ends_what_still_runs_there() -> None:
    loop = EventLoopThread()
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(30.0)
        finally:
            ended.append(True)

    future = loop.submit(work())
    loop.run(asyncio.sleep(0.05))
    loop.close()

    assert ended == [True]
    assert future.cancelled()


async def test_a_server_that_a_dead_run_left_paused_in_an_update_is_cleared_and_becomes_ready(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(servers[0].url)
    await pool.post_to_all("/pause_generation", {"mode": "retract"})
    await pool.post_to_all("/begin_weight_update", {})

    await pool.wait_ready(3.0)

    assert servers[0].paths()[-3:] == ["/abort_request", "/end_weight_update", "/continue_generation"]


async def test_long_responses_that_nobody_waits_for_hold_up_no_start_of_a_run(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    pool = await start_pool(servers[0].url)
    make_updates_wait_for_responses(servers[0])

    await asyncio.wait_for(pool.wait_ready(PROMPT_SECONDS), PROMPT_SECONDS)

    assert servers[0].paths().count("/end_weight_update") == 1


async def test_long_responses_that_nobody_waits_for_hold_up_no_return_from_quarantine(
    servers: list[ScriptedServer], start_pool: StartPool
) -> None:
    """Also where a call waits for them that is still under way."""
    pool = await start_pool(servers[0].url)
    server = pool.membership.servers[0]
    make_updates_wait_for_responses(servers[0])
    stuck = asyncio.create_task(pool.post(server, "/end_weight_update", {}, DEADLINE_SECONDS))
    pool.membership.quarantine(server, RolloutError("it is slow"))
    await asyncio.sleep(0.05)
    assert not stuck.done()

    await recovery.call_back(pool, at_once=True)

    assert stuck.done() and pool.membership.quarantined == []


def make_updates_wait_for_responses(server: ScriptedServer) -> None:
    """As in SGLang where it is not paused."""
    aborted = asyncio.Event()

    async def abort(_: web.Request, body: Json) -> web.StreamResponse:
        assert body == {"abort_all": True}
        aborted.set()
        return web.Response()

    async def end(*_: object) -> web.StreamResponse:
        await aborted.wait()
        return success()

    server.script("/abort_request", abort)
    server.script("/end_weight_update", end)

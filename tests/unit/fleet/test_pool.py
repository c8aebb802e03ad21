"""Calls to rollout servers: where they go, which failures are tried again, and what the error says."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from megatron_a3po.errors import RolloutError, RolloutServerDied
from megatron_a3po.fleet import recovery
from megatron_a3po.fleet.event_loop import EventLoopThread
from megatron_a3po.fleet.timings import FleetTimings
from tests.support.scripted_server import (
    DEADLINE_SECONDS,
    FAST,
    PROMPT_SECONDS,
    REQUEST,
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
from tests.unit.fleet.conftest import Pair, quarantined, sample


async def test_generation_goes_to_the_least_busy_server(pair: Pair) -> None:
    pool = pair.connect()
    for server in pair.servers:
        server.generation_seconds = lambda _: 0.1
    await sample(pool, 8)
    assert [len(server.bodies("/generate")) for server in pair.servers] == [4, 4]
    assert [client.in_flight for client in pool.clients] == [0, 0]

    pair.first.script("/generate", hang)
    stuck = asyncio.create_task(pool.generate(REQUEST))
    await asyncio.sleep(0.05)
    for _ in range(3):
        await pool.generate(REQUEST)
    assert [len(server.bodies("/generate")) for server in pair.servers] == [5, 7]
    stuck.cancel()


async def test_a_lost_connection_is_tried_again_and_is_an_error_when_it_is_lost_every_time(pair: Pair) -> None:
    pool = pair.connect(pair.first.url)
    pair.first.script("/generate", close_connection, calls=range(1, 3))
    (response,) = await pool.generate(REQUEST)
    assert len(response.output_ids) == 4 and len(pair.first.bodies("/generate")) == 3

    pair.first.script("/generate", close_connection)
    with pytest.raises(RolloutServerDied, match=f"{pair.first.url}/generate"):
        await pool.generate(REQUEST)


async def test_a_lost_connection_is_tried_again_on_another_server_though_the_dead_one_is_least_busy(pair: Pair) -> None:
    pair.first.script("/generate", close_connection)
    pair.second.generation_seconds = lambda _: 0.2
    await sample(pair.connect(), 6)
    assert len(pair.second.bodies("/generate")) == 6


NO_RESPONSE: dict[str, tuple[Action, str]] = {
    "refusal 400": (refuse(400, "the input is too long"), "400.*the input is too long"),
    "refusal 500": (refuse(500, "the input is too long"), "500.*the input is too long"),
    "silence": (hang, r"no sign of life for 0\.3 s"),
    "broken json": (answer_text("{broken", "application/json"), ""),
    "text": (answer_text("all is well", "text/plain"), ""),
    "no metadata": (answer({"output_ids": [1]}), ""),
    "ids are no numbers": (answer({"output_ids": ["a"], "meta_info": {"finish_reason": {"type": "stop"}}}), ""),
    "no finish reason": (answer({"output_ids": [], "meta_info": {"finish_reason": None}}), ""),
    "null": (answer([None]), ""),
}


@pytest.mark.parametrize("case", NO_RESPONSE)
async def test_what_is_no_response_is_an_error_that_names_the_server_and_not_tried_again(case: str, pair: Pair) -> None:
    action, words = NO_RESPONSE[case]
    pool = pair.connect(pair.first.url, timeout_seconds=0.3 if action is hang else 30.0)
    pair.first.script("/generate", action)
    with pytest.raises(RolloutError, match=f"{pair.first.url}.*{words}"):
        await pool.generate(REQUEST)
    assert len(pair.first.bodies("/generate")) == 1 and pool.clients[0].in_flight == 0


async def test_a_dead_local_process_ends_a_request_the_watch_and_the_wait_without_further_attempts(pair: Pair) -> None:
    pool = pair.connect(pair.first.url, find_dead=lambda: "it ended; its log is x.log")
    for path in ("/generate", "/model_info", "/ready"):
        pair.first.script(path, close_connection)
    async with asyncio.timeout(PROMPT_SECONDS):
        for work in (pool.generate(REQUEST), pool.watch(), pool.wait_ready(DEADLINE_SECONDS)):
            with pytest.raises(RolloutServerDied, match=r"x\.log"):
                await work
    assert len(pair.first.bodies("/generate")) == 1


async def test_the_watch_goes_on_in_a_pause_and_raises_after_several_missed_answers_in_a_row(pair: Pair) -> None:
    pool = pair.connect()
    await pool.post_to_all("/pause_generation", {"mode": "retract"})
    # Four misses, an answer, then misses only.
    pair.second.script("/model_info", refuse(500, "busy"), calls=range(1, 5))
    watch = asyncio.create_task(pool.watch())
    await asyncio.sleep(0.4)
    assert not watch.done()

    pair.second.script("/model_info", close_connection)
    with pytest.raises(RolloutServerDied, match=pair.second.url):
        await asyncio.wait_for(watch, PROMPT_SECONDS)


async def test_waiting_ends_with_the_servers_description_once_all_are_ready(pair: Pair) -> None:
    pair.second.script("/ready", refuse(503, "loading"), calls=range(1, 2))
    infos = await pair.connect().wait_ready(DEADLINE_SECONDS)
    assert [info.tp_size for info in infos] == [1, 1]
    assert infos[0].enable_priority_scheduling


@pytest.mark.parametrize(
    ("path", "action", "words"),
    [
        ("/ready", refuse(503, "loading"), r"0\.3 s.*rollout\.start_timeout_seconds"),
        ("/server_info", answer([]), "/server_info"),
    ],
)
async def test_a_server_that_does_not_become_ready_is_an_error_with_its_url_and_a_remedy(
    path: str, action: Action, words: str, pair: Pair
) -> None:
    pair.first.script(path, action)
    with pytest.raises(RolloutError, match=f"{pair.first.url}.*{words}"):
        await pair.connect(pair.first.url).wait_ready(0.3)


async def test_one_refusing_server_fails_the_call_to_all_at_once_though_another_hangs(pair: Pair) -> None:
    pair.first.script("/begin_weight_update", hang)
    pair.second.script("/begin_weight_update", refuse(400, "a session is open"))
    async with asyncio.timeout(PROMPT_SECONDS):
        with pytest.raises(RolloutError, match=f"{pair.second.url}.*a session is open"):
            await pair.connect(timeout_seconds=DEADLINE_SECONDS).post_to_all("/begin_weight_update", {})
    assert pair.first.paths() == ["/begin_weight_update"]


async def test_reset_undoes_in_order_at_a_slow_server_and_minds_no_server_with_nothing_to_undo(pair: Pair) -> None:
    events: list[str] = []

    async def end_slowly(*_: object) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        events.append("ended")
        return success()

    async def resume(*_: object) -> web.StreamResponse:
        events.append("resumed")
        return success()

    pair.first.script("/end_weight_update", refuse(400, "no session"))
    pair.second.script("/end_weight_update", end_slowly)
    pair.second.script("/continue_generation", resume)
    pool = pair.connect()
    await asyncio.gather(*map(pool.reset, pool.membership.members))
    for server in pair.servers:
        assert server.paths() == ["/abort_request", "/end_weight_update", "/continue_generation"]
    assert events == ["ended", "resumed"]


async def test_a_request_after_a_long_idle_time_uses_no_connection_that_the_server_is_closing(pair: Pair) -> None:
    assert FleetTimings().keep_alive_seconds < 5.0, "an SGLang server closes idle connections after 5 s"
    pool = pair.connect(pair.first.url, timings=replace(FAST, keep_alive_seconds=0.3))
    client_ports: list[int] = []

    async def note_port(request: web.Request, _: Json) -> web.StreamResponse:
        assert request.transport is not None
        client_ports.append(request.transport.get_extra_info("peername")[1])
        return success()

    pair.first.script("/end_weight_update", note_port)
    for pause in (0.0, 0.0, 0.5):
        await asyncio.sleep(pause)
        await pool.post_to_all("/end_weight_update", {})
    assert client_ports[0] == client_ports[1] != client_ports[2]


def test_closing_the_event_loop_ends_what_still_runs_there_and_it_refuses_further_work() -> None:
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
    assert ended == [True] and future.cancelled()

    more = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(more)
    more.close()


async def test_a_server_that_a_dead_run_left_paused_in_an_update_is_cleared_and_becomes_ready(pair: Pair) -> None:
    pool = pair.connect(pair.first.url)
    await pool.post_to_all("/pause_generation", {"mode": "retract"})
    await pool.post_to_all("/begin_weight_update", {})
    await pool.wait_ready(3.0)
    assert pair.first.paths()[-3:] == ["/abort_request", "/end_weight_update", "/continue_generation"]


async def test_long_responses_that_nobody_waits_for_hold_up_no_start_and_no_return_from_quarantine(pair: Pair) -> None:
    """Also where a call waits for them that is still under way."""
    pool = pair.connect(pair.first.url)
    server = pool.membership.servers[0]
    make_updates_wait_for_responses(pair.first)
    await asyncio.wait_for(pool.wait_ready(PROMPT_SECONDS), PROMPT_SECONDS)
    assert pair.first.paths().count("/end_weight_update") == 1

    make_updates_wait_for_responses(pair.first)
    stuck = asyncio.create_task(pool.post(server, "/end_weight_update", {}, DEADLINE_SECONDS))
    pool.membership.quarantine(server, RolloutError("it is slow"))
    await asyncio.sleep(0.05)
    assert not stuck.done()
    await recovery.call_back(pool, at_once=True)
    assert stuck.done() and quarantined(pool) == []


def make_updates_wait_for_responses(server: ScriptedServer) -> None:
    """As in SGLang where it is not paused."""
    aborted = asyncio.Event()

    async def abort(_: web.Request, body: Json) -> web.StreamResponse:
        assert body == {"abort_all": True}
        aborted.set()
        return web.Response()

    async def end(*_: Any) -> web.StreamResponse:
        await aborted.wait()
        return success()

    server.script("/abort_request", abort)
    server.script("/end_weight_update", end)

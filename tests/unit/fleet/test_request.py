"""How long requests wait: a server that is slow or paused keeps its place, and one that is silent loses it."""

import asyncio
import logging
import math
from dataclasses import replace

import pytest
import pytest_asyncio

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet import client as client_module
from megatron_a3po.fleet import recovery
from megatron_a3po.fleet.membership import Quarantined
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import GenerateResponse
from megatron_a3po.fleet.request import Patience, ask
from megatron_a3po.fleet.timings import LeaseTimings
from tests.support.deadlines import scaled
from tests.support.scripted_server import FAST, REQUEST, ScriptedServer, answer, close_connection, hang
from tests.unit.fleet.conftest import Pair, quarantined, sample
from tests.unit.rollout.test_collector import wait_until

SILENCE_SECONDS = scaled(0.2)
TIMES = replace(FAST, lease=LeaseTimings(lease_seconds=SILENCE_SECONDS))


@pytest_asyncio.fixture
async def pool(pair: Pair) -> ServerPool:
    """Of two servers, one is enough."""
    pool = pair.connect(timeout_seconds=SILENCE_SECONDS, min_servers=1, timings=TIMES)
    await pool.for_each(pool.describe)
    return pool


def keep_alive(pool: ServerPool, *numbers: int) -> None:
    """The schedulers of these servers answer at any time."""
    for number in numbers:
        pool.membership.servers[number].lease.last_answer = math.inf


def generate_for(pair: Pair, seconds: float) -> None:
    for server in pair.servers:
        server.generation_seconds = lambda _: seconds


async def test_slow_servers_keep_their_place_since_answers_to_the_lease_show_that_they_live(
    pair: Pair,
    pool: ServerPool,
) -> None:
    generate_for(pair, 3 * SILENCE_SECONDS)
    for server in pool.membership.servers:
        assert await server.lease.take()
    answers = await sample(pool, 12)
    assert len(answers) == 12 and all(len(response.output_ids) == 4 for response in answers)
    assert quarantined(pool) == []


async def test_a_server_with_a_blocked_scheduler_is_left_out_and_its_requests_move(
    pair: Pair, pool: ServerPool
) -> None:
    """Its front end answers all the same."""
    keep_alive(pool, 1)
    assert await pool.membership.servers[0].lease.take()
    for path in ("/open_session", "/server_info", "/generate"):
        pair.first.script(path, hang)
    answers = await sample(pool, 8)
    assert len(answers) == 8 and len(pair.first.bodies("/generate")) == 4
    assert quarantined(pool) == [pair.first.url]
    error = str(pool.membership.quarantined[0].error)
    assert f"{pair.first.url} has given no sign of life for {SILENCE_SECONDS:g} s" in error
    assert "rollout.request_timeout_seconds" in error
    assert pool.clients[0].in_flight == 0


async def test_servers_that_lost_a_connection_and_are_too_busy_to_describe_themselves_are_waited_for(
    pair: Pair, pool: ServerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_DESCRIBE_SECONDS", 0.05)
    pool._silence_seconds = 60.0
    for server, scripted in zip(pool.membership.servers, pair.servers, strict=True):
        server.is_suspect = True
        scripted.script("/server_info", hang, calls=range(2, 6))
    answers = await sample(pool, 2)
    assert len(answers) == 2 and quarantined(pool) == []
    assert [len(server.bodies("/generate")) for server in pair.servers] == [1, 1]
    assert not any(server.is_suspect for server in pool.membership.servers)


async def test_a_server_that_lost_a_connection_and_never_describes_itself_again_is_left_out_by_its_silence(
    pair: Pair, pool: ServerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_DESCRIBE_SECONDS", 0.05)
    keep_alive(pool, 1)
    pool.membership.servers[0].is_suspect = True
    pair.first.script("/server_info", hang)
    assert len(await sample(pool, 1)) == 1
    assert quarantined(pool) == [pair.first.url] and pair.first.bodies("/generate") == []
    assert f"has given no sign of life for {SILENCE_SECONDS:g} s" in str(pool.membership.quarantined[0].error)


async def test_the_time_in_which_a_server_is_asked_nothing_is_no_silence(pair: Pair, pool: ServerPool) -> None:
    pool._silence_seconds = 60.0
    pool.membership.servers[0].last_heard -= 100.0
    pair.first.generation_seconds = lambda _: 3 * FAST.request_look_seconds
    await sample(pool, 1)
    assert len(pair.first.bodies("/generate")) == 1 and quarantined(pool) == []


@pytest.mark.parametrize("is_chosen", [False, True])
async def test_a_request_that_a_living_server_does_not_answer_moves_and_costs_nobody(
    pair: Pair, pool: ServerPool, caplog: pytest.LogCaptureFixture, is_chosen: bool
) -> None:
    """Sooner where that server was asked for."""
    keep_alive(pool, 0, 1)
    pair.first.script("/generate", hang)
    first = pool.membership.servers[0]
    (response,) = await asyncio.wait_for(pool.generate(REQUEST, first if is_chosen else None), 60.0)
    assert len(response.output_ids) == 4 and quarantined(pool) == []
    assert [len(server.bodies("/generate")) for server in pair.servers] == [1, 1]
    seconds = (1.0 if is_chosen else FAST.patience) * SILENCE_SECONDS
    assert f"{first.url} lives, and has not answered a request for {seconds:g} s" in caplog.text


async def test_a_request_that_takes_longer_than_any_should_is_answered_in_the_end(pair: Pair, pool: ServerPool) -> None:
    keep_alive(pool, 0, 1)
    generate_for(pair, 1.2 * FAST.patience * SILENCE_SECONDS)
    (response,) = await sample(pool, 1)
    assert len(response.output_ids) == 4 and quarantined(pool) == []


async def test_a_pause_longer_than_any_patience_costs_nobody(pair: Pair, pool: ServerPool) -> None:
    """Nor are requests given to others, since their time does not run."""
    states = pool.membership
    generate_for(pair, 0.05)
    requests = asyncio.create_task(sample(pool, 6))
    await wait_until(lambda: sum(server.in_flight for server in pair.servers) == 6)
    states.begin_publication()
    await pool.post_to_all("/pause_generation", {"mode": "retract"}, 60.0)
    await asyncio.sleep(1.5 * FAST.patience * SILENCE_SECONDS)
    assert not requests.done()

    keep_alive(pool, 0, 1)
    states.end_publication()
    await pool.post_to_all("/continue_generation", {}, 60.0)

    assert len(await asyncio.wait_for(requests, 60.0)) == 6
    assert quarantined(pool) == []
    assert sum(len(server.bodies("/generate")) for server in pair.servers) == 6


async def test_what_keeps_a_server_out_is_told_whenever_it_is_something_else(
    pair: Pair, pool: ServerPool, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedServer() as late:
        pool.add(late.url)
        server = pool.membership.servers[2]
        told = []
        for sampling_params in ({"top_k": 1}, {"top_k": 1}, None):
            description = {"preferred_sampling_params": sampling_params, "speculative_algorithm": "EAGLE"}
            late.script("/server_info", answer(description))
            await recovery.call_back(pool, at_once=True)
            told.append(str(server.error))
        assert told[0] == told[1] and "start the server without --preferred-sampling-params" in told[0]
        assert "start the server without --speculative-algorithm" in told[2]
        late.script("/server_info", close_connection)
        await recovery.call_back(pool, at_once=True)
    assert str(server.error) == told[2]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"{text}; {late.url} stays in quarantine" for text in (told[0], told[2])]


@pytest.mark.parametrize("iterations", range(8))
async def test_a_response_that_comes_as_its_server_goes_into_quarantine_is_used_or_asked_for_again(
    pair: Pair, pool: ServerPool, iterations: int
) -> None:
    """A response without version labels, as an aborted one is, shows nothing wrong by itself."""
    server = pool.membership.servers[0]
    response = (await pool.generate(REQUEST))[0]
    unlabelled = response.model_copy(
        update={"meta_info": response.meta_info.model_copy(update={"weight_versions": []})}
    )

    async def quarantine_later() -> None:
        for _ in range(iterations):
            await asyncio.sleep(0)
        pool.membership.quarantine(server, RolloutError("it failed"))

    async def generate(_: object) -> list[GenerateResponse]:
        failing.append(asyncio.create_task(quarantine_later()))
        return [unlabelled]

    failing: list[asyncio.Task[None]] = []
    server.client.generate = generate  # type: ignore[method-assign]
    patience = Patience(silence_seconds=60.0, answer_seconds=60.0, look_seconds=60.0)
    try:
        assert await ask(pool.membership, server, REQUEST, patience) == [unlabelled]
    except Quarantined:
        await failing[0]
    await asyncio.gather(*failing)
    assert not server.is_member

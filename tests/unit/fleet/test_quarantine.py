"""What is sampled while servers fail: requests go to others, and nothing by unconfirmed weights is accepted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import pytest_asyncio
from aiohttp import web

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import GenerateResponse, generate_request
from megatron_a3po.prompts.prompts import Prompt
from megatron_a3po.rollout.buffer import StalenessBuffer
from megatron_a3po.rollout.collector import RolloutCollector
from megatron_a3po.rollout.ledger import Ledger
from megatron_a3po.rollout.sampler import Responses, Sampler, Sampling
from megatron_a3po.types import TrajectoryGroup
from tests.support.scripted_server import (
    FAST,
    Action,
    Json,
    ScriptedServer,
    answer,
    close_connection,
    hang,
    refuse,
    response,
)
from tests.unit.rollout.test_collector import Digits, wait_until

REQUEST = generate_request([1, 2, 3], num_samples=1, max_new_tokens=4, temperature=1.0, priority=0)
StartPool = Callable[..., Awaitable[ServerPool]]


@dataclass
class Pair:
    """Two servers, of which one is enough, at version 3."""

    first: ScriptedServer
    second: ScriptedServer
    pool: ServerPool

    @property
    def quarantined(self) -> list[str]:
        return [server.url for server in self.pool.membership.quarantined]

    async def sample(self, number: int = 6) -> list[GenerateResponse]:
        answers = await asyncio.wait_for(asyncio.gather(*(self.pool.generate(REQUEST) for _ in range(number))), 60.0)
        return [response for responses in answers for response in responses]

    async def publish(self, version: int) -> None:
        self.pool.membership.begin_update()
        for server in (self.first, self.second):
            server.version = str(version)
        self.pool.membership.confirm(version)


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(ScriptedServer(version="3")) for _ in range(2)]
        pool = ServerPool([first.url, second.url], timeout_seconds=5.0, min_servers=1, timings=FAST)
        stack.push_async_callback(pool.close)
        await pool.for_each(pool.describe)
        pool.membership.confirm(3)
        yield Pair(first, second, pool)


def versions(responses: list[GenerateResponse]) -> set[str]:
    return {span.version for response in responses for span in response.meta_info.weight_versions}


async def test_nothing_is_asked_of_servers_before_a_version_is_confirmed_there(pair: Pair) -> None:
    pool = ServerPool([pair.first.url], timeout_seconds=5.0)
    request = asyncio.create_task(pool.generate(REQUEST))
    await asyncio.sleep(0.1)
    assert pair.first.calls == []

    pool.membership.confirm(3)

    assert len(await asyncio.wait_for(request, 60.0)) == 1
    await pool.close()


OLD = {
    "label of an unpublished model": "default",
    "label of an older version": "2",
    "label of a version to come": "4",
    "no label": "",
}


@pytest.mark.parametrize("name", OLD)
async def test_tokens_of_a_version_that_was_not_confirmed_are_sampled_again_elsewhere(pair: Pair, name: str) -> None:
    pair.first.version = OLD[name]

    responses = await pair.sample()

    assert versions(responses) == {"3"} and len(responses) == 6
    assert pair.quarantined == [pair.first.url]


async def test_tokens_from_before_and_after_a_publication_are_accepted(pair: Pair) -> None:
    for server in (pair.first, pair.second):
        server.generation_seconds = lambda _: 0.2
    sampling = asyncio.create_task(pair.sample())
    await wait_until(lambda: pair.first.in_flight + pair.second.in_flight == 6)

    await pair.publish(4)

    assert versions(await sampling) == {"3", "4"}
    assert pair.quarantined == []


@pytest.mark.parametrize("label", ["default", "3"])
async def test_a_server_that_was_restarted_with_weights_of_its_own_is_not_sampled_from(pair: Pair, label: str) -> None:
    """Also where it calls them by the version that was confirmed."""

    async def restart(request: web.Request, body: Json) -> web.StreamResponse:
        pair.first.startup_time += 1.0
        pair.first.version = label
        return await close_connection(request, body)

    pair.first.script("/generate", restart, calls=range(1, 2))
    await pair.sample()
    await pair.sample()

    assert pair.quarantined == [pair.first.url]
    accepted_there = 6 + 6 - len(pair.second.bodies("/generate"))
    assert accepted_there <= len(pair.first.bodies("/generate")) - 1
    before = len(pair.first.bodies("/generate"))
    await pair.sample()
    assert len(pair.first.bodies("/generate")) == before


async def test_a_server_whose_label_changes_between_requests_is_found_by_the_watch(pair: Pair) -> None:
    watch = asyncio.create_task(pair.pool.watch())
    pair.first.version = "default"

    await wait_until(lambda: pair.quarantined == [pair.first.url])

    error = pair.pool.membership.quarantined[0].error
    assert "default instead of 3" in str(error)
    assert not watch.done()
    watch.cancel()


@pytest.mark.parametrize(
    "action",
    [refuse(500, "CUDA error"), refuse(503, "busy"), close_connection, answer({"output_ids": "x"})],
    ids=["500", "503", "lost", "no response"],
)
async def test_requests_of_a_server_that_fails_go_to_the_other(pair: Pair, action: Action) -> None:
    pair.first.script("/generate", action)

    responses = await pair.sample()
    for _ in range(3):
        responses += await pair.sample()

    assert len(responses) == 24 and len(pair.second.bodies("/generate")) == 24


async def test_requests_under_way_leave_a_server_that_falls_silent(pair: Pair) -> None:
    watch = asyncio.create_task(pair.pool.watch())
    pair.first.script("/generate", hang)
    sampling = asyncio.create_task(pair.sample())
    await wait_until(lambda: len(pair.first.bodies("/generate")) == 3)

    pair.first.script("/model_info", close_connection)

    assert len(await sampling) == 6
    assert pair.quarantined == [pair.first.url]
    assert pair.pool.clients[0].in_flight == 0
    watch.cancel()


async def test_with_too_few_servers_every_request_and_the_watch_end_with_all_culprits(pair: Pair) -> None:
    watch = asyncio.create_task(pair.pool.watch())
    pair.first.version = "default"
    await wait_until(lambda: pair.quarantined == [pair.first.url])
    pair.second.script("/generate", refuse(500, "CUDA error"))

    message = rf"(?s){pair.second.url}.*CUDA error.*0 of 2.*publish\.min_servers = 1.*before.*{pair.first.url}.*default"
    with pytest.raises(RolloutError, match=message):
        await pair.sample()
    with pytest.raises(RolloutError, match=message):
        await asyncio.wait_for(watch, 60.0)


async def test_no_group_is_lost_or_counted_twice_when_servers_fail_in_the_middle(pair: Pair) -> None:
    ledger = Ledger()
    buffer = StalenessBuffer(groups_per_batch=4, max_staleness=1, num_batches=6, ledger=ledger)
    sampler = Sampler(
        pair.pool, Digits(), Sampling(num_samples=2, max_new_tokens=4, temperature=1.0), max_in_flight=1000
    )

    async def sample(group_id: int) -> Responses:
        return await sampler.sample_group(Prompt(prompt_id=str(group_id), token_ids=(1, group_id + 2)), group_id)

    async def reward(sampled: Responses) -> TrajectoryGroup:
        return TrajectoryGroup(group_id=sampled.group_id, trajectories=sampled.trajectories)

    collector = RolloutCollector(buffer, sample, reward, pair.pool.watch, max_concurrent_groups=5)
    for server in (pair.first, pair.second):
        server.generation_seconds = lambda number: 0.01 * (number % 4)
    await pair.publish(0)
    collector.start()
    taken: list[int] = []
    for version in range(1, 7):
        await asyncio.wait_for(collector.batch_complete(), 60.0)
        taken += [trajectory.group_id for trajectory in collector.take_batch()[::2]]
        if version == 2:
            pair.first.script("/generate", hang)
            pair.first.script("/model_info", close_connection)
        await pair.publish(version)
        collector.set_version(version)

    assert pair.quarantined == [pair.first.url]
    assert taken == list(range(24))
    counts = ledger.counts()
    assert (counts["issued"], counts["consumed"], counts["dropped"]) == (24, 24, 0)
    await collector.stop()


async def test_a_server_that_is_not_there_at_the_start_is_left_out_when_the_others_are_enough(pair: Pair) -> None:
    pool = ServerPool([pair.first.url, "http://127.0.0.1:9"], timeout_seconds=5.0, min_servers=1)

    infos = await pool.wait_ready(0.5)

    assert len(infos) == 1
    assert [server.url for server in pool.membership.quarantined] == ["http://127.0.0.1:9"]
    await pool.close()


def test_a_scripted_response_says_its_versions() -> None:
    spans = response(num_tokens=4, versions=["1", "2"])["meta_info"]["weight_versions"]
    assert [(span["version"], span["start"], span["end"]) for span in spans] == [("1", 0, 2), ("2", 2, 4)]

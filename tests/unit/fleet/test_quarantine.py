"""What is sampled while servers fail: requests go to others, and nothing by unconfirmed weights is accepted."""

import asyncio

import pytest
import pytest_asyncio
from aiohttp import web

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import GenerateResponse
from megatron_a3po.prompts.prompts import Prompt
from megatron_a3po.rollout.buffer import StalenessBuffer
from megatron_a3po.rollout.collector import RolloutCollector
from megatron_a3po.rollout.ledger import Ledger
from megatron_a3po.rollout.sampler import Responses, Sampler, Sampling
from megatron_a3po.types import TrajectoryGroup
from tests.support.scripted_server import (
    DEADLINE_SECONDS,
    REQUEST,
    Action,
    Json,
    answer,
    close_connection,
    hang,
    refuse,
)
from tests.unit.fleet.conftest import Pair, quarantined, sample
from tests.unit.rollout.test_collector import Digits, wait_until


@pytest_asyncio.fixture
async def pool(pair: Pair) -> ServerPool:
    """Of the two servers, one is enough, and silence alone ends nothing."""
    pool = pair.connect(version=None, min_servers=1, timeout_seconds=DEADLINE_SECONDS)
    await pool.for_each(pool.describe)
    publish(pair, pool, 3)
    return pool


def publish(pair: Pair, pool: ServerPool, version: int) -> None:
    pool.membership.begin_update()
    for server in pair.servers:
        server.version = str(version)
    pool.membership.confirm(version)


def versions(responses: list[GenerateResponse]) -> set[str]:
    return {span.version for response in responses for span in response.meta_info.weight_versions}


async def test_nothing_is_asked_of_servers_before_a_version_is_confirmed_there(pair: Pair) -> None:
    pool = pair.connect(pair.first.url, version=None)
    request = asyncio.create_task(pool.generate(REQUEST))
    await asyncio.sleep(0.1)
    assert pair.first.calls == []
    pool.membership.confirm(0)
    assert len(await asyncio.wait_for(request, 60.0)) == 1


@pytest.mark.parametrize("label", ["default", "2", "4", ""])
async def test_tokens_of_an_unconfirmed_version_are_sampled_again_elsewhere(
    pair: Pair, pool: ServerPool, label: str
) -> None:
    pair.first.version = label
    responses = await sample(pool, 6)
    assert versions(responses) == {"3"} and len(responses) == 6
    assert quarantined(pool) == [pair.first.url]


async def test_tokens_from_before_and_after_a_publication_are_accepted(pair: Pair, pool: ServerPool) -> None:
    for server in pair.servers:
        server.generation_seconds = lambda _: 0.2
    sampling = asyncio.create_task(sample(pool, 6))
    await wait_until(lambda: pair.first.in_flight + pair.second.in_flight == 6)
    publish(pair, pool, 4)
    assert versions(await sampling) == {"3", "4"}
    assert quarantined(pool) == []


@pytest.mark.parametrize("label", ["default", "3"])
async def test_a_server_restarted_with_weights_of_its_own_is_not_sampled_from(
    pair: Pair, pool: ServerPool, label: str
) -> None:
    """Also where it calls them by the version that was confirmed."""

    async def restart(request: web.Request, body: Json) -> web.StreamResponse:
        pair.first.startup_time += 1.0
        pair.first.version = label
        return await close_connection(request, body)

    pair.first.script("/generate", restart, calls=range(1, 2))
    await sample(pool, 6)
    await sample(pool, 6)

    assert quarantined(pool) == [pair.first.url]
    accepted_there = 6 + 6 - len(pair.second.bodies("/generate"))
    assert accepted_there <= len(pair.first.bodies("/generate")) - 1
    before = len(pair.first.bodies("/generate"))
    await sample(pool, 6)
    assert len(pair.first.bodies("/generate")) == before


@pytest.mark.parametrize(
    "action",
    [refuse(500, "CUDA error"), refuse(503, "busy"), close_connection, answer({"output_ids": "x"})],
    ids=["500", "503", "lost", "no response"],
)
async def test_requests_of_a_server_that_fails_go_to_the_other(pair: Pair, pool: ServerPool, action: Action) -> None:
    pair.first.script("/generate", action)
    responses = [response for _ in range(4) for response in await sample(pool, 6)]
    assert len(responses) == 24 and len(pair.second.bodies("/generate")) == 24


async def test_with_too_few_servers_requests_and_the_watch_end_with_all_culprits(pair: Pair, pool: ServerPool) -> None:
    watch = asyncio.create_task(pool.watch())
    pair.first.version = "default"
    await wait_until(lambda: quarantined(pool) == [pair.first.url])
    assert "default instead of 3" in str(pool.membership.quarantined[0].error) and not watch.done()
    pair.second.script("/generate", refuse(500, "CUDA error"))

    message = rf"{pair.second.url}.*CUDA error.*0 of 2.*publish\.min_servers = 1.*{pair.first.url}.*default"
    with pytest.raises(RolloutError, match=message):
        await sample(pool, 6)
    with pytest.raises(RolloutError, match=message):
        await asyncio.wait_for(watch, 60.0)


async def test_no_group_is_lost_or_counted_twice_when_servers_fail_in_the_middle(pair: Pair, pool: ServerPool) -> None:
    ledger = Ledger()
    buffer = StalenessBuffer(groups_per_batch=4, max_staleness=1, num_batches=6, ledger=ledger)
    sampler = Sampler(pool, Digits(), Sampling(num_samples=2, max_new_tokens=4, temperature=1.0), max_in_flight=1000)

    async def sample(group_id: int) -> Responses:
        return await sampler.sample_group(Prompt(prompt_id=str(group_id), token_ids=(1, group_id + 2)), group_id)

    async def reward(sampled: Responses) -> TrajectoryGroup:
        return TrajectoryGroup(group_id=sampled.group_id, trajectories=sampled.trajectories)

    collector = RolloutCollector(buffer, sample, reward, pool.watch, max_concurrent_groups=5)
    for server in pair.servers:
        server.generation_seconds = lambda number: 0.01 * (number % 4)
    publish(pair, pool, 0)
    collector.start()
    taken: list[int] = []
    asked = 0
    for version in range(1, 7):
        await asyncio.wait_for(collector.batch_complete(), 60.0)
        taken += [trajectory.group_id for trajectory in collector.take_batch()[::2]]
        if version == 2:
            asked = len(pair.first.bodies("/generate"))
            pair.first.script("/generate", hang)
            pair.first.script("/model_info", close_connection)
        publish(pair, pool, version)
        collector.set_version(version)

    assert len(pair.first.bodies("/generate")) > asked, "some waited for the silent server"
    assert quarantined(pool) == [pair.first.url] and pool.clients[0].in_flight == 0
    assert taken == list(range(24))
    counts = ledger.counts()
    assert (counts["issued"], counts["consumed"], counts["dropped"]) == (24, 24, 0)
    await collector.stop()

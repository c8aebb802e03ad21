"""After a publication every server samples something for the comparison with the trainer, also a busy one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import generate_request
from megatron_a3po.prompts.prompts import Prompt
from megatron_a3po.rollout.sampler import URGENT, Responses, Sampler, Sampling
from tests.support.scripted_server import ScriptedServer, hang, refuse
from tests.unit.rollout.test_collector import Digits, wait_until

PROMPTS = [Prompt(prompt_id=str(number), token_ids=(1, number + 2)) for number in range(7)]
SAMPLING = Sampling(num_samples=8, max_new_tokens=512, temperature=0.7)


@pytest_asyncio.fixture
async def servers() -> AsyncIterator[list[ScriptedServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ScriptedServer(version="3")) for _ in range(3)]


@pytest_asyncio.fixture
async def pool(servers: list[ScriptedServer]) -> AsyncIterator[ServerPool]:
    pool = ServerPool([server.url for server in servers], timeout_seconds=60.0, min_servers=1)
    pool.membership.confirm(3)
    yield pool
    await pool.close()


async def sample(pool: ServerPool, num_prompts: int) -> list[Responses]:
    sampler = Sampler(pool, Digits(), SAMPLING, max_in_flight=1)
    return await asyncio.wait_for(sampler.sample_everywhere(PROMPTS[:num_prompts], 16), 60.0)


def asked_of(server: ScriptedServer) -> list[list[int]]:
    """The prompts of the one request, if there is one."""
    requests = server.bodies("/generate")
    assert len(requests) <= 1
    ids = [request["input_ids"] for request in requests]
    return ids if not ids or isinstance(ids[0][0], int) else ids[0]


@pytest.mark.parametrize(
    ("num_prompts", "hands"),
    [(1, [[0], [0], [0]]), (2, [[0], [1], [0]]), (3, [[0], [1], [2]]), (7, [[0, 3, 6], [1, 4], [2, 5]])],
)
async def test_prompts_are_dealt_to_all_servers_in_turn(
    servers: list[ScriptedServer], pool: ServerPool, num_prompts: int, hands: list[list[int]]
) -> None:
    sampled = await sample(pool, num_prompts)

    assert [asked_of(server) for server in servers] == [
        [list(PROMPTS[number].token_ids) for number in hand] for hand in hands
    ]
    assert [item.prompt.prompt_id for item in sampled] == [str(number) for hand in hands for number in hand]
    for item in sampled:
        (trajectory,) = item.trajectories
        assert trajectory.token_ids[:2].tolist() == list(item.prompt.token_ids)
        assert trajectory.response_length == 16 and trajectory.weight_versions.unique().tolist() == [3]
        # What the scripted server samples depends on the prompt.
        assert int(trajectory.token_ids[2]) == sum(item.prompt.token_ids) % 50 + 1
    bodies = [body for server in servers for body in server.bodies("/generate")]
    assert {body["priority"] for body in bodies} == {URGENT}
    assert {(body["sampling_params"]["n"], body["sampling_params"]["temperature"]) for body in bodies} == {(1, 0.7)}


async def test_a_busy_server_is_asked_all_the_same(servers: list[ScriptedServer], pool: ServerPool) -> None:
    servers[0].script("/generate", hang, calls=range(1, 6))
    request = generate_request([9], num_samples=1, max_new_tokens=4, temperature=1.0, priority=0)
    busy = asyncio.gather(*(pool.generate(request, pool.membership.servers[0]) for _ in range(5)))
    await wait_until(lambda: len(servers[0].bodies("/generate")) == 5)

    await sample(pool, 4)

    assert [len(server.bodies("/generate")) for server in servers] == [6, 1, 1]
    busy.cancel()


@pytest.mark.parametrize("is_known", [True, False])
async def test_the_prompts_of_a_server_that_fails_are_sampled_elsewhere(
    servers: list[ScriptedServer], pool: ServerPool, is_known: bool
) -> None:
    servers[1].script("/generate", refuse(500, "CUDA error"))
    if is_known:
        pool.membership.quarantine(pool.membership.servers[1], RolloutError("it is silent"))

    sampled = await sample(pool, 4)

    assert sorted(item.prompt.prompt_id for item in sampled) == ["0", "1", "2", "3"]
    assert [server.url for server in pool.membership.quarantined] == [servers[1].url]
    if is_known:
        assert [len(asked_of(server)) for server in servers] == [2, 0, 2]


async def test_without_prompts_nothing_is_asked(servers: list[ScriptedServer], pool: ServerPool) -> None:
    assert await sample(pool, 0) == []
    assert all(server.calls == [] for server in servers)

"""What becomes of responses under way when weights are published: retract, in_place and abort."""

import asyncio

import pytest
import pytest_asyncio

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.prompts.prompts import Prompt
from megatron_a3po.rollout.sampler import Sampler, Sampling
from tests.support.publishing import CONTINUE, UPDATE, OneRank, fleet_of, make_publisher, serve, some_tensors
from tests.support.receiver import Receiver
from tests.support.scripted_server import ScriptedServer, answer, response
from tests.unit.fleet.conftest import Pair
from tests.unit.rollout.test_collector import Digits, wait_until

pytestmark = pytest.mark.usefixtures("default_group")

PROMPT = Prompt(prompt_id="p", token_ids=(1, 2, 3))
LENGTH = 8
IN_PLACE = {"tp_size": 1, "disable_radix_cache": True, "disable_overlap_schedule": True}


@pytest.fixture
def server(pair: Pair) -> ScriptedServer:
    return pair.first


@pytest_asyncio.fixture
async def pool(pair: Pair) -> ServerPool:
    return pair.connect(pair.first.url, timeout_seconds=10.0, pause_mode="abort")


def sampler(pool: ServerPool, group_size: int = 2, ends: frozenset[int] = frozenset()) -> Sampler:
    sampling = Sampling(num_samples=group_size, max_new_tokens=LENGTH, temperature=1.0)
    return Sampler(pool, Digits(), sampling, max_in_flight=1000, stop_token_ids=ends)


async def publish(pool: ServerPool, server: ScriptedServer, version: int) -> None:
    pool.num_pauses += 1
    await pool.post_to_all("/pause_generation", {"mode": "abort"})
    pool.membership.begin_update()
    server.version = str(version)
    pool.membership.confirm(version)
    await pool.post_to_all("/continue_generation", {})


async def test_aborted_responses_go_on_from_their_tokens_as_often_as_weights_are_published(
    pool: ServerPool, server: ScriptedServer
) -> None:
    server.generation_seconds = lambda number: 20.0 if number <= 5 else 0.0
    sampling = asyncio.create_task(sampler(pool).sample_group(PROMPT, 0))
    for version in range(1, 6):
        await wait_until(lambda: server.in_flight == 1)
        await publish(pool, server, version)
        await wait_until(lambda asked=version + 1: len(server.bodies("/generate")) == asked)

    trajectories = (await asyncio.wait_for(sampling, 60.0)).trajectories

    # Half of what is missing comes before each pause: 4, 2, 1, 0 and 0 of 8 tokens, and the last one after all of them.
    assert [list(item.weight_versions) for item in trajectories] == [[0, 0, 0, 0, 1, 1, 2, 5]] * 2
    for item in trajectories:
        assert list(item.token_ids[:3]) == [1, 2, 3] and item.response_length == LENGTH
        assert len(item.behaviour_logprobs) == LENGTH
    bodies = server.bodies("/generate")
    assert [len(ids) for ids in bodies[2]["input_ids"]] == [3 + 4 + 2] * 2
    assert [own["max_new_tokens"] for own in bodies[2]["sampling_params"]] == [2, 2]
    answered = [trajectory.token_ids.tolist() for trajectory in trajectories]
    assert bodies[-1]["input_ids"] == [ids[:-1] for ids in answered]


async def test_only_the_aborted_responses_of_a_group_go_on(pool: ServerPool, server: ScriptedServer) -> None:
    whole = response(num_tokens=LENGTH, versions=["0"], seed=11)
    stopped = response(num_tokens=3, versions=["0"], finish_reason="stop", seed=12)
    cut = response(num_tokens=5, versions=["0"], finish_reason="abort", seed=13)
    server.script("/generate", answer([whole, cut, stopped]), calls=range(1, 2))

    trajectories = (await sampler(pool, 3).sample_group(PROMPT, 0)).trajectories

    assert [item.response_length for item in trajectories] == [LENGTH, LENGTH, 3]
    assert trajectories[1].token_ids.tolist()[:8] == [1, 2, 3, *cut["output_ids"]]
    (body,) = server.bodies("/generate")[1:]
    assert body["input_ids"] == [[1, 2, 3, *cut["output_ids"]]]
    assert [(own["n"], own["max_new_tokens"]) for own in body["sampling_params"]] == [(1, 3)]


async def test_a_response_aborted_at_its_last_or_end_token_is_whole(pool: ServerPool, server: ScriptedServer) -> None:
    full = response(num_tokens=LENGTH, versions=["0"], finish_reason="abort", seed=40)
    cut = response(num_tokens=5, versions=["0"], finish_reason="abort", seed=11)
    ended = response(num_tokens=4, versions=["0"], finish_reason="abort", seed=30)
    server.script("/generate", answer([full, cut, ended]), calls=range(1, 2))
    ends = frozenset(ended["output_ids"][-1:])

    first, second, third = (await sampler(pool, 3, ends).sample_group(PROMPT, 0)).trajectories

    for item in (first, second):
        assert (item.response_length, str(item.finish_reason)) == (LENGTH, "length")
    assert (third.token_ids.tolist(), str(third.finish_reason)) == ([1, 2, 3, *ended["output_ids"]], "stop")
    (body,) = server.bodies("/generate")[1:]
    assert body["input_ids"] == [[1, 2, 3, *cut["output_ids"]]]


async def test_responses_that_are_aborted_without_a_pause_are_an_error_after_some_attempts(
    pool: ServerPool, server: ScriptedServer
) -> None:
    nothing = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "no memory"}}}
    server.script("/generate", answer([nothing, nothing]))

    with pytest.raises(RolloutError, match="aborted it 3 times"):
        await sampler(pool).sample_group(PROMPT, 0)


async def test_in_place_needs_servers_without_radix_cache_and_overlap(pair: Pair, server: ScriptedServer) -> None:
    pool = pair.connect(server.url, version=None, pause_mode="in_place")
    for info, missing in (
        ({}, "--disable-radix-cache"),
        ({"disable_radix_cache": True}, "--disable-overlap-schedule"),
    ):
        server.script("/server_info", answer(info))
        with pytest.raises(RolloutError, match=rf"{server.url}.*{missing}.*retract"):
            await pool.wait_ready(5.0)
    server.script("/server_info", answer(IN_PLACE))
    assert (await pool.wait_ready(5.0))[0].disable_radix_cache


@pytest.mark.parametrize(("mode", "flushes"), [("retract", True), ("abort", True), ("in_place", False)])
def test_a_publication_pauses_as_asked_and_flushes_what_the_pause_leaves_unused(
    mode: str, flushes: bool, first_receiver: Receiver
) -> None:
    with serve(first_receiver) as (server,):
        server.script("/server_info", answer(IN_PLACE))
        with (
            fleet_of(server.url, pause_mode=mode) as fleet,
            make_publisher(OneRank(some_tensors, 120), fleet, 5.0) as publisher,
        ):
            publisher.publish(0)
        assert server.bodies("/pause_generation") == [{"mode": mode}]
        assert [body["flush_cache"] for body in server.bodies(UPDATE)] == [False, flushes]
        assert "/flush_cache" not in server.paths() and server.paths().count(CONTINUE) == 1

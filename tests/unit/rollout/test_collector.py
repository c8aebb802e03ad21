"""Collection against a server that misbehaves: order, age and accounts are right, and nothing waits for ever."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from megatron_a3po.errors import RewardError, RolloutError, RolloutServerDied
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.prompts.prompts import Prompt
from megatron_a3po.rewards.types import FailureKind, RewardFailure, Sample, Score
from megatron_a3po.rollout.buffer import StalenessBuffer
from megatron_a3po.rollout.collector import RolloutCollector
from megatron_a3po.rollout.ledger import Ledger
from megatron_a3po.rollout.rewarder import Rewarder, Shaping
from megatron_a3po.rollout.sampler import Sampler, Sampling
from megatron_a3po.types import Trajectory
from tests.support.scripted_server import (
    DEADLINE_SECONDS,
    FAST,
    PROMPT_SECONDS,
    ScriptedServer,
    answer,
    close_connection,
    hang,
    refuse,
    response,
)

MAX_FAILED_SHARE = 0.02
GROUPS_PER_BATCH, GROUP_SIZE, MAX_STALENESS, NUM_BATCHES, MAX_CONCURRENT = 3, 2, 2, 8, 5


class Digits:
    """Decodes a token as its number."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


class Scores:
    """Scores without processes: `wrong` says for a prompt what goes wrong, and `hold` keeps rewards back."""

    def __init__(self) -> None:
        self.wrong: dict[str, RewardFailure] = {}
        self.hold = asyncio.Event()
        self.hold.set()

    async def score(self, groups: Sequence[Sequence[Sample]]) -> list[list[Score] | RewardFailure]:
        await self.hold.wait()
        return [
            self.wrong.get(group[0].prompt_id) or [Score(value=1.0, reason="right") for _ in group] for group in groups
        ]


@dataclass
class Rollouts:
    """The real parts of a run's rollout side, wired as in a run."""

    server: ScriptedServer
    pool: ServerPool
    sampler: Sampler
    ledger: Ledger
    buffer: StalenessBuffer
    collector: RolloutCollector[Any]
    scores: Scores
    death: list[str]
    """A message here means that the local process has ended."""

    def start(self) -> None:
        self.publish(0)
        self.collector.start()

    def publish(self, version: int) -> None:
        self.server.version = str(version)
        self.confirm(version)

    def confirm(self, version: int) -> None:
        """As after a publication."""
        self.pool.membership.confirm(version)
        self.collector.set_version(version)

    async def next_batch(self) -> list[Trajectory]:
        await asyncio.wait_for(self.collector.batch_complete(), DEADLINE_SECONDS)
        batch = self.collector.take_batch()
        self.check_ledger()
        return batch

    def check_ledger(self) -> dict[str, Any]:
        counts: dict[str, Any] = self.ledger.counts()
        closed = counts["consumed"] + counts["dropped"]
        assert counts["issued"] == closed + counts["in_flight"] + counts["buffered"], counts
        return counts


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the deadline passed"
        await asyncio.sleep(0.01)


async def let_the_loop_run() -> None:
    """Until everything that could happen at once has happened."""
    for _ in range(20):
        await asyncio.sleep(0)


PARTIAL = response(num_tokens=2, versions=["0"], finish_reason="abort")
ABORTED = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "no memory"}}}
WHOLE = response(num_tokens=4, versions=["0"])
EVALUATION = Sampling(num_samples=1, max_new_tokens=4, temperature=1.0)


def prompt(group_id: int) -> Prompt:
    return Prompt(prompt_id=f"task/0/{group_id}", token_ids=(1, group_id + 2))


@pytest_asyncio.fixture
async def rollouts(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rollouts]:
    async with ScriptedServer(version="0") as server:
        death: list[str] = []
        pool = ServerPool(
            [server.url],
            timeout_seconds=DEADLINE_SECONDS,
            find_dead=lambda: death[0] if death else None,
            timings=FAST,
        )
        sampling = Sampling(num_samples=GROUP_SIZE, max_new_tokens=4, temperature=1.0)
        sampler = Sampler(pool, Digits(), sampling, max_in_flight=100)
        ledger = Ledger()
        buffer = StalenessBuffer(
            groups_per_batch=GROUPS_PER_BATCH, max_staleness=MAX_STALENESS, num_batches=NUM_BATCHES, ledger=ledger
        )
        scores = Scores()
        rewarder = Rewarder(scores, Shaping(max_new_tokens=8), max_failed_share=MAX_FAILED_SHARE)
        collector = RolloutCollector(
            buffer,
            lambda group_id: sampler.sample_group(prompt(group_id), group_id),
            rewarder.reward_group,
            pool.watch,
            max_concurrent_groups=MAX_CONCURRENT,
            max_failed_share=MAX_FAILED_SHARE,
        )
        made = Rollouts(server, pool, sampler, ledger, buffer, collector, scores, death)
        yield made
        await asyncio.wait_for(collector.stop(), PROMPT_SECONDS)
        made.check_ledger()
        ledger.drop_open("run_ended")
        counts = made.check_ledger()
        assert counts["in_flight"] == counts["buffered"] == 0
        await pool.close()
        await asyncio.sleep(0.02)
        own = asyncio.current_task()
        leftovers = [task for task in asyncio.all_tasks() if task is not own and "megatron_a3po" in repr(task)]
        assert not leftovers, "stop() left tasks behind"


async def test_batches_come_in_issue_order_though_groups_end_in_any_order(rollouts: Rollouts) -> None:
    delays = [0.06, 0.0, 0.03, 0.09, 0.01]
    rollouts.server.generation_seconds = lambda number: delays[number % len(delays)]
    rollouts.start()

    for step in range(NUM_BATCHES):
        batch = await rollouts.next_batch()
        expected = range(step * GROUPS_PER_BATCH, (step + 1) * GROUPS_PER_BATCH)
        assert [trajectory.group_id for trajectory in batch] == [id for id in expected for _ in range(GROUP_SIZE)]
        assert [trajectory.prompt_id for trajectory in batch[::GROUP_SIZE]] == [f"task/0/{id}" for id in expected]
        rollouts.publish(step + 1)

    counts = rollouts.check_ledger()
    assert (counts["issued"], counts["consumed"]) == (GROUPS_PER_BATCH * NUM_BATCHES,) * 2
    assert rollouts.server.max_in_flight == MAX_CONCURRENT


async def test_no_token_is_older_than_the_cap_while_versions_advance(rollouts: Rollouts) -> None:
    rollouts.server.generation_seconds = lambda number: 0.12 if number % 4 == 1 else 0.005
    rollouts.start()
    ages = []

    for version in range(NUM_BATCHES):
        batch = await rollouts.next_batch()
        ages += [version - int(trajectory.weight_versions.min()) for trajectory in batch]
        ages += [version - int(trajectory.weight_versions.max()) for trajectory in batch]
        await asyncio.sleep(0.01)  # a training step
        rollouts.publish(version + 1)
        assert rollouts.ledger.issued <= (version + 1 + MAX_STALENESS + 1) * GROUPS_PER_BATCH

    assert min(ages) >= 0 and max(ages) <= MAX_STALENESS
    assert max(ages) > 0, "rollouts went on while the trainer trained"


async def test_issue_stops_at_the_staleness_budget_and_goes_on_with_the_next_version(rollouts: Rollouts) -> None:
    rollouts.start()
    budget = (MAX_STALENESS + 1) * GROUPS_PER_BATCH
    await wait_until(lambda: rollouts.check_ledger()["buffered"] == budget)

    await rollouts.next_batch()
    await let_the_loop_run()
    assert rollouts.ledger.issued == budget

    rollouts.publish(1)
    await wait_until(lambda: rollouts.check_ledger()["buffered"] == budget)
    await let_the_loop_run()
    assert rollouts.ledger.issued == budget + GROUPS_PER_BATCH


async def test_a_failing_group_ends_the_wait_with_the_first_cause(rollouts: Rollouts) -> None:
    rollouts.server.script("/generate", hang)
    rollouts.server.script("/generate", refuse(400, "prompt is too long"), calls=range(2, 3))
    rollouts.server.generation_seconds = lambda _: DEADLINE_SECONDS
    rollouts.start()

    with pytest.raises(RolloutError, match="prompt is too long"):
        await asyncio.wait_for(rollouts.next_batch(), PROMPT_SECONDS)
    with pytest.raises(RolloutError, match="prompt is too long"):
        await rollouts.next_batch()


async def test_a_group_without_reward_is_dropped_with_its_reason_and_the_next_one_takes_its_place(
    rollouts: Rollouts,
) -> None:
    kinds = {"task/0/1": FailureKind.TIMEOUT, "task/0/5": FailureKind.ERROR}
    rollouts.scores.wrong = {id: RewardFailure(kind=kind, message="") for id, kind in kinds.items()}
    rollouts.start()

    consumed = []
    for step in range(NUM_BATCHES):
        consumed += [trajectory.group_id for trajectory in (await rollouts.next_batch())[::GROUP_SIZE]]
        rollouts.publish(step + 1)

    assert consumed == [id for id in range(GROUPS_PER_BATCH * NUM_BATCHES + 2) if id not in (1, 5)]
    counts = rollouts.check_ledger()
    assert counts["dropped_by_reason"] == {"reward_timeout": 1, "reward_error": 1}
    assert counts["consumed"] == GROUPS_PER_BATCH * NUM_BATCHES


async def test_more_failures_than_allowed_end_the_wait_with_their_counts(rollouts: Rollouts) -> None:
    failure = RewardFailure(kind=FailureKind.ERROR, message="in the user's code")
    rollouts.scores.wrong = {f"task/0/{id}": failure for id in range(3)}
    rollouts.start()

    with pytest.raises(RewardError, match=r"3 reward_error.*reward\.max_failed_share = 0\.02.*in the user's code"):
        await rollouts.next_batch()


async def test_the_servers_go_on_while_rewards_are_computed(rollouts: Rollouts) -> None:
    rollouts.scores.hold.clear()
    rollouts.start()
    budget = (MAX_STALENESS + 1) * GROUPS_PER_BATCH

    await wait_until(lambda: len(rollouts.server.bodies("/generate")) == budget)

    assert budget > MAX_CONCURRENT and rollouts.check_ledger()["buffered"] == 0
    rollouts.scores.hold.set()
    await rollouts.next_batch()


@pytest.mark.parametrize("wait_for", ["a batch", "an evaluation"])
@pytest.mark.parametrize("end", ["its process has ended", "nothing answers"])
async def test_the_end_of_the_only_server_ends_every_wait_promptly(rollouts: Rollouts, wait_for: str, end: str) -> None:
    rollouts.server.script("/generate", hang)
    rollouts.start()
    evaluation = rollouts.sampler.sample_each([prompt(0), prompt(1)], EVALUATION)
    work: Awaitable[Any] = rollouts.next_batch() if wait_for == "a batch" else rollouts.collector.or_failure(evaluation)
    waiting = asyncio.ensure_future(work)
    await wait_until(lambda: len(rollouts.server.bodies("/generate")) > 0)
    assert not waiting.done()

    if end == "nothing answers":
        await rollouts.server.__aexit__()
    else:
        rollouts.death.append("killed by SIGKILL")

    with pytest.raises(RolloutServerDied, match=rollouts.server.url if end == "nothing answers" else "SIGKILL"):
        await asyncio.wait_for(waiting, PROMPT_SECONDS)
    evaluation.close()


async def test_connections_lost_now_and_then_lose_no_group(rollouts: Rollouts) -> None:
    rollouts.server.script("/generate", close_connection, calls=range(1, 12, 3))
    rollouts.start()

    batches = [await rollouts.next_batch() for _ in range(2)]

    ids = [trajectory.group_id for batch in batches for trajectory in batch[::GROUP_SIZE]]
    assert ids == list(range(2 * GROUPS_PER_BATCH))


async def test_an_aborted_group_is_sampled_again(rollouts: Rollouts) -> None:
    rollouts.server.script("/generate", answer([WHOLE, PARTIAL]), calls=range(1, 3))
    rollouts.start()

    batch = await rollouts.next_batch()

    assert len(batch) == GROUPS_PER_BATCH * GROUP_SIZE
    assert all(trajectory.response_length == 4 for trajectory in batch)
    priorities = [body["priority"] for body in rollouts.server.bodies("/generate")]
    assert priorities.count(0) + priorities.count(-1) == 4


async def test_an_aborted_response_of_an_evaluation_is_sampled_again_and_never_counted_as_wrong(
    rollouts: Rollouts,
) -> None:
    rollouts.server.script("/generate", answer([PARTIAL] * 2), calls=range(1, 2))
    rollouts.publish(0)

    responses = await rollouts.sampler.sample_each([prompt(0), prompt(1)], EVALUATION)

    assert [item.trajectories[0].response_length for item in responses] == [4, 4]


@pytest.mark.parametrize(
    ("responses", "label", "message"),
    [
        ([ABORTED] * GROUP_SIZE, "0", "aborted"),  # every time
        ([], "0", "0 of 2"),
        ([WHOLE], "0", "1 of 2"),
        ([WHOLE] * 3, "0", "3 of 2"),
        (None, "default", "default"),
        (None, "3", "version 3"),  # which is not published
    ],
)
async def test_a_group_without_all_responses_or_with_tokens_of_another_version_is_an_error(
    rollouts: Rollouts, responses: list[Any] | None, label: str, message: str
) -> None:
    if responses is not None:
        rollouts.server.script("/generate", answer(responses))
    rollouts.confirm(0)
    rollouts.server.version = label
    rollouts.collector.start()

    with pytest.raises(RolloutError, match=message):
        await rollouts.next_batch()


async def test_stopping_in_the_middle_ends_every_request_and_every_wait(rollouts: Rollouts) -> None:
    rollouts.server.script("/generate", hang)
    rollouts.start()
    waiting = asyncio.create_task(rollouts.collector.batch_complete())
    await wait_until(lambda: rollouts.check_ledger()["in_flight"] >= MAX_CONCURRENT)

    await asyncio.wait_for(rollouts.collector.stop(), PROMPT_SECONDS)

    assert all(client.in_flight == 0 for client in rollouts.pool.clients)
    done, _ = await asyncio.wait({waiting}, timeout=PROMPT_SECONDS)
    assert done


async def test_a_pause_holds_groups_back_and_loses_none(rollouts: Rollouts) -> None:
    rollouts.publish(0)
    await rollouts.pool.post_to_all("/pause_generation", {"mode": "retract"})
    rollouts.collector.start()
    await wait_until(lambda: rollouts.server.in_flight == MAX_CONCURRENT)
    assert rollouts.check_ledger()["buffered"] == 0

    await rollouts.pool.post_to_all("/continue_generation", {})

    assert len(await rollouts.next_batch()) == GROUPS_PER_BATCH * GROUP_SIZE

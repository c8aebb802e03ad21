"""What an evaluation asks of the servers, writes down and reports."""

import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from megatron_a3po.errors import RewardError
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.prompts.prompts import Prompt
from megatron_a3po.rewards.types import FailureKind, RewardFailure, Sample, Score
from megatron_a3po.rollout.evaluator import Evaluator
from megatron_a3po.rollout.rewarder import Rewarder, Shaping
from megatron_a3po.rollout.sampler import Sampler, Sampling
from megatron_a3po.runtime.waiting import REAL, Clock
from tests.support.scripted_server import ScriptedServer
from tests.unit.rollout.test_collector import Digits

LONG, SHORT = 5, 3
DATASETS = {
    "sums": [Prompt(prompt_id=f"sums/{i}", token_ids=(1, 2 + i), question=f"{i}+{i}?", answer=2 * i) for i in range(6)],
    "words": [Prompt(prompt_id=f"words/{i}", token_ids=(1, 90 + i), question=f"word {i}") for i in range(130)],
}
SHAPING = Shaping(max_new_tokens=8, format_penalty=0.0, length_penalty=0.5)


class ByNumber:
    """The first so many responses to a prompt are right as its number says; words are half right; one has no reward."""

    async def score(self, groups: Sequence[Sequence[Sample]]) -> list[list[Score] | RewardFailure]:
        return [self._score(group) for group in groups]

    def _score(self, group: Sequence[Sample]) -> list[Score] | RewardFailure:
        dataset, number = group[0].prompt_id.split("/")
        if group[0].prompt_id == "sums/5":
            return RewardFailure(kind=FailureKind.ERROR, message="no reward for this one")
        values = [0.5 if dataset == "words" else float(index < int(number)) for index in range(len(group))]
        return [Score(value=value, reason="", has_format=True) for value in values]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(version="7") as server:
        yield server


@pytest_asyncio.fixture
async def pool(server: ScriptedServer) -> AsyncIterator[ServerPool]:
    pool = ServerPool([server.url], timeout_seconds=10.0)
    pool.membership.confirm(7)
    yield pool
    await pool.close()


def evaluator(
    pool: ServerPool, folder: Path, sampling: Sampling, max_failed_share: float = 0.2, clock: Clock = REAL
) -> Evaluator:
    training = Sampling(num_samples=8, max_new_tokens=99, temperature=1.0)
    sampler = Sampler(pool, Digits(), training, max_in_flight=16)
    rewarder = Rewarder(ByNumber(), SHAPING, max_failed_share=max_failed_share)
    return Evaluator(DATASETS, sampler, rewarder, sampling, folder, clock)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


async def test_the_report_is_what_the_records_say(server: ScriptedServer, pool: ServerPool, tmp_path: Path) -> None:
    sampling = Sampling(num_samples=4, max_new_tokens=LONG, temperature=0.6)
    sums, words = await evaluator(pool, tmp_path, sampling).evaluate("step_00000007")

    rewards: dict[str, list[float]] = defaultdict(list)
    for record in records(tmp_path / "step_00000007"):
        assert record["weight_versions"] == [7] and record["num_tokens"] == LONG == len(record["response"].split())
        assert record["sample"] == len(rewards[record["prompt_id"]])
        rewards[record["prompt_id"]].append(record["reward"])
    # Number i of sums has i right responses of four, and the last one has no reward.
    assert {name: sum(values) for name, values in rewards.items() if "sums" in name} == {
        f"sums/{i}": float(min(i, 4)) for i in range(5)
    }
    assert len(rewards) == 5 + 130 and all(len(values) == 4 for values in rewards.values())
    assert (sums.num_prompts, sums.num_without_reward, sums.num_samples, sums.weight_versions) == (5, 1, 4, (7,))
    assert "5 prompts (1 more without a reward)," in str(sums) and "without" not in str(words)
    assert sums.average == pytest.approx((0 + 1 + 2 + 3 + 4) / 20)
    # pass@2: one minus the chance that both of two are wrong.
    assert sums.pass_at == pytest.approx({1: 0.5, 2: (0 + 1 / 2 + 5 / 6 + 1 + 1) / 5, 4: 4 / 5})
    assert (words.average, words.pass_at[4], words.num_prompts) == (0.5, 0.0, 130)
    summary = json.loads((tmp_path / "step_00000007" / "summary.json").read_text(encoding="utf-8"))
    assert summary["evaluated"] == "version 7"
    assert summary["sampling"] == {"num_samples": 4, "max_new_tokens": LONG, "temperature": 0.6}
    assert [entry["dataset"] for entry in summary["datasets"]] == ["sums", "words"]
    assert summary["datasets"][0]["pass_at"] == {str(k): value for k, value in sums.pass_at.items()}
    assert sums.metrics()["eval/sums/pass_at_4"] == sums.pass_at[4]
    assert sums.metrics()["eval/sums/average_low"] < 0.5 < sums.metrics()["eval/sums/average_high"]


async def test_requests_say_how_to_sample_come_before_training_and_are_not_too_many_at_once(
    server: ScriptedServer, pool: ServerPool, tmp_path: Path
) -> None:
    server.generation_seconds = lambda number: 0.01
    await evaluator(pool, tmp_path, Sampling(num_samples=4, max_new_tokens=SHORT, temperature=0.0)).evaluate("a")

    bodies = server.bodies("/generate")
    asked = ("temperature", "max_new_tokens", "n")
    assert {tuple(body["sampling_params"][name] for name in asked) for body in bodies} == {(0.0, SHORT, 4)}
    assert [body["input_ids"] for body in bodies[:6]] == [[1, 2 + i] for i in range(6)]
    assert min(body["priority"] for body in bodies) > 1 << 39
    assert server.max_in_flight == 16 // 4


async def test_one_response_per_prompt_is_asked_for_in_few_requests(
    server: ScriptedServer, pool: ServerPool, tmp_path: Path
) -> None:
    sampling = Sampling(num_samples=1, max_new_tokens=SHORT, temperature=1.0)
    sums, _ = await evaluator(pool, tmp_path, sampling).evaluate("a")
    assert len(server.bodies("/generate")) == 1 + 3
    # The first response to each prompt but number 0 is right.
    assert sums.average == pytest.approx(4 / 5) and sums.pass_at == {1: pytest.approx(4 / 5)}
    assert "eval/sums/pass_at_1" not in sums.metrics()


async def test_an_evaluation_that_fails_leaves_no_summary(pool: ServerPool, tmp_path: Path) -> None:
    sampling = Sampling(num_samples=2, max_new_tokens=SHORT, temperature=1.0)
    await evaluator(pool, tmp_path, sampling).evaluate("a", "models/x")
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["evaluated"] == "models/x"
    with pytest.raises(RewardError, match=r"1 of 6 .*reward\.max_failed_share = 0"):
        await evaluator(pool, tmp_path, sampling, max_failed_share=0.0).evaluate("a")
    assert not (tmp_path / "a" / "summary.json").exists()


async def test_long_evaluations_say_how_far_they_are(
    pool: ServerPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "megatron_a3po")
    hours = Clock(now=itertools.count(step=3600.0).__next__)
    sampling = Sampling(num_samples=2, max_new_tokens=SHORT, temperature=1.0)
    await evaluator(pool, tmp_path, sampling, clock=hours).evaluate("a")
    assert "evaluating sums: 2 of 12 responses" in caplog.text and "evaluating words: 258 of 260" in caplog.text

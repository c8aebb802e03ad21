"""Prompts of a dataset and a reward function of one's own, as the training loop sees them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_a3po.algorithm.advantage import compute_advantages
from megatron_a3po.config import DataConfig, RewardConfig, RolloutConfig, RunConfig
from megatron_a3po.errors import RewardError
from megatron_a3po.prompts.prompts import Prompt
from megatron_a3po.rewards.scorers import TaskSpec
from megatron_a3po.rewards.types import FailureKind, RewardFailure, Sample, Score
from megatron_a3po.rewards.worker_pool import worker_settings
from megatron_a3po.rollout.rank_zero import shaping
from megatron_a3po.rollout.rewarder import Rewarder, Shaping
from megatron_a3po.rollout.sampler import Responses
from megatron_a3po.rollout.source import RolloutSource
from megatron_a3po.runtime.metrics import batch_metrics
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.types import TrajectoryGroup
from tests.support.scripted_server import ScriptedServer
from tests.support.trajectories import make_trajectory
from tests.unit.rollout.test_source import Run

PROMPTS, GROUP_SIZE, STEPS, BROKEN = 3, 2, 4, 5


@pytest.fixture
def config(tmp_path: Path, server: ScriptedServer, model: Path) -> RunConfig:
    rows = [{"q": f"What is {i} + {i}?", "sum": 2 * i, "broken": BROKEN} for i in range(1, 13)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "run").mkdir()
    return RunConfig(
        model=model,
        run_dir=tmp_path / "run",
        num_steps=STEPS,
        max_staleness=1,
        data=DataConfig(
            path=tmp_path / "sums.jsonl",
            columns={"prompt": "q", "answer": "sum", "broken": "broken"},
            num_held_out=2,
        ),
        reward=RewardConfig(
            scorer="tests.support.reward_functions:wrong_for_odd_rows", max_failed_share=0.5, length_penalty=0.5
        ),
        rollout=RolloutConfig(servers=[server.url], prompts_per_step=PROMPTS, group_size=GROUP_SIZE, max_new_tokens=4),
    )


@pytest.mark.parametrize(
    ("data", "scorer", "expected"),
    [
        ({"task": "spell_backward", "task_options": {"min_word_len": 6}}, "auto", "task"),
        ({"path": "sums.jsonl"}, "auto", "math"),
        ({"task": "spell_backward"}, "math", "math"),
    ],
)
def test_a_run_of_a_task_is_rewarded_by_the_task_and_one_of_a_dataset_by_mathematics(
    data: dict[str, Any], scorer: str, expected: str
) -> None:
    spec = worker_settings(run_config(data, scorer=scorer)).spec
    task = TaskSpec(name=data["task"], options=data.get("task_options", {})) if "task" in data else None
    assert (spec.scorer, spec.task) == (expected, task)


def test_the_penalties_and_limits_are_those_of_the_configuration() -> None:
    reward = {"format_pattern": "x", "format_penalty": 0.5, "length_penalty": 0.25, "timeout_seconds": 7}
    made = run_config({"task": "spell_backward"}, **reward, max_workers=3, worker_memory_bytes=None)

    assert shaping(made) == Shaping(max_new_tokens=50, format_penalty=0.5, length_penalty=0.25)
    settings = worker_settings(made)
    assert (settings.timeout_seconds, settings.max_workers, settings.memory_bytes) == (7, 3, None)
    assert settings.spec.format_pattern == "x" and settings.log_file == Path("r/logs/rewards.log")


def run_config(data: dict[str, Any], **reward: Any) -> RunConfig:
    return RunConfig(
        model=Path("m"),
        run_dir=Path("r"),
        num_steps=1,
        data=DataConfig(**data),
        reward=RewardConfig(**reward),
        rollout=RolloutConfig(max_new_tokens=50),
    )


def responses(number: int) -> Responses:
    trajectory = make_trajectory([0] * 4, number, prompt_id=f"task/{number}", reward=math.nan)
    prompt = Prompt(prompt_id=f"task/{number}", token_ids=(0, 1))
    return Responses(prompt=prompt, group_id=number, trajectories=(trajectory,) * 2, texts=("a", "b"))


class Scores:
    """One right answer in the wrong format for each response; prompts below `num_failed` get no reward."""

    def __init__(self, num_failed: int = 0) -> None:
        self._num_failed = num_failed

    async def score(self, groups: Sequence[Sequence[Sample]]) -> list[list[Score] | RewardFailure]:
        return [self._score(group) for group in groups]

    def _score(self, group: Sequence[Sample]) -> list[Score] | RewardFailure:
        if int(group[0].prompt_id.split("/")[1]) < self._num_failed:
            return RewardFailure(kind=FailureKind.ERROR, message="in the user's code")
        return [Score(value=1.0, reason="right", has_format=False) for _ in group]


async def test_training_rewards_are_shaped_and_those_of_an_evaluation_are_not() -> None:
    penalties = Shaping(max_new_tokens=8, format_penalty=0.25, length_penalty=0.5)
    rewarder = Rewarder(Scores(), penalties, max_failed_share=0.0)
    group = await rewarder.reward_group(responses(0))
    (evaluated,) = await rewarder.score_each([responses(0)])

    # Four tokens of eight, and not in the format.
    assert isinstance(group, TrajectoryGroup)
    for trajectories, reward in ((group.trajectories, 0.5), (evaluated.trajectories, 1.0)):
        assert [(item.reward, item.reward_reason) for item in trajectories] == [(reward, "right_bad_format")] * 2


@pytest.mark.parametrize(
    ("number", "num_failed", "is_right"), [(100, 2, True), (100, 3, False), (30, 2, True), (2, 2, False)]
)
async def test_an_evaluation_leaves_out_what_has_no_reward_and_fails_where_that_is_too_much_or_all(
    number: int, num_failed: int, is_right: bool
) -> None:
    rewarder = Rewarder(Scores(num_failed), Shaping(max_new_tokens=8), max_failed_share=0.02)
    scoring = rewarder.score_each([responses(index) for index in range(number)])
    if is_right:
        assert [item.group_id for item in await scoring] == list(range(num_failed, number))
    else:
        with pytest.raises(RewardError, match=rf"{num_failed} of {number} .*reward\.max_failed_share = 0\.02"):
            await scoring


def start(source: RolloutSource, server: ScriptedServer) -> Run:
    fleet = source.connect(lambda message: None)
    assert fleet is not None
    run = Run(source, fleet, server)
    run.publish(0)
    return run


def test_groups_without_reward_are_left_out_and_counted_while_batches_stay_whole(
    config: RunConfig, server: ScriptedServer, gloo_group: dist.ProcessGroup
) -> None:
    with RolloutSource(config, rank=0, gloo_group=gloo_group, timer=PhaseTimer()) as source:
        run = start(source, server)
        numbers = []
        for step in range(STEPS):
            batch = source.next_batch()
            groups = [trajectory.group_id for trajectory in batch]
            advantages = compute_advantages(
                torch.tensor([trajectory.reward for trajectory in batch]), torch.tensor(groups), "grpo"
            )
            metrics = batch_metrics(batch, advantages, step)
            even = [int(trajectory.prompt_id.split("/")[1]) % 2 == 0 for trajectory in batch]
            assert len(batch) == PROMPTS * GROUP_SIZE and groups == sorted(groups)
            # All responses are as long as they may be, which costs half a point.
            assert [trajectory.reward for trajectory in batch] == [0.5 if is_even else -0.5 for is_even in even]
            assert metrics.get("reward_reason/even", 0.0) == pytest.approx(sum(even) / len(batch))
            numbers += [trajectory.prompt_id for trajectory in batch[::GROUP_SIZE]]
            run.publish(step + 1)
        counts = source.ledger_counts()
        # 12 groups are trained on out of epochs of 10 prompts.
        held_out = {prompt.prompt_id for prompt in source._rank0._prompts.held_out}  # type: ignore[union-attr]
        num_broken = counts["issued"] - counts["consumed"]
        assert f"sums/{BROKEN}" not in numbers and held_out.isdisjoint(numbers)
        assert num_broken in (1, 2) if f"sums/{BROKEN}" not in held_out else num_broken == 0
        assert source.metrics() == ({"dropped/reward_error": num_broken} if num_broken else {})
        assert counts["consumed"] == STEPS * PROMPTS and len(set(numbers[:9])) == 9


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("no_such_module:f", r"reward\.scorer = 'no_such_module:f'.* PYTHONPATH"),
        ("tests.support.reward_functions:bad", r"3 reward_error.*reward\.max_failed_share = 0\.02.*KeyError"),
    ],
)
def test_a_scorer_that_does_not_exist_or_always_fails_ends_the_run_before_its_first_training_step(
    config: RunConfig, server: ScriptedServer, gloo_group: dist.ProcessGroup, scorer: str, message: str
) -> None:
    reward = config.reward.model_copy(update={"scorer": scorer, "max_failed_share": 0.02})
    mistaken = config.model_copy(update={"reward": reward})

    def first_batch() -> None:
        with RolloutSource(mistaken, rank=0, gloo_group=gloo_group, timer=PhaseTimer()) as source:
            start(source, server)  # raises if the worker has tried to import the scorer by then
            source.next_batch()

    with pytest.raises(RewardError, match=message):
        first_batch()

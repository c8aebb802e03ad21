"""Prompts of a dataset and a reward function of one's own, as the training loop sees them."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_a3po.algorithm.advantage import compute_advantages
from megatron_a3po.config import DataConfig, RewardConfig, RolloutConfig, RunConfig
from megatron_a3po.errors import RewardError
from megatron_a3po.fleet.event_loop import EventLoopThread
from megatron_a3po.rollout.source import RolloutSource
from megatron_a3po.runtime.metrics import batch_metrics
from megatron_a3po.runtime.timing import PhaseTimer
from tests.support.scripted_server import ScriptedServer
from tests.unit.rollout.test_source import Run, import_tool

PROMPTS, GROUP_SIZE, STEPS, BROKEN = 3, 2, 4, 5


@pytest.fixture
def gloo_group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=10))
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    loop, server = EventLoopThread(), ScriptedServer(version="0")
    loop.run(server.__aenter__(), 5.0)
    yield server
    loop.run(server.__aexit__(), 5.0)
    loop.close()


@pytest.fixture
def config(tmp_path: Path, server: ScriptedServer) -> RunConfig:
    tokenizer = import_tool().make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    described = {"model_type": "qwen3", "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    (tmp_path / "model" / "config.json").write_text(json.dumps(described), encoding="utf-8")
    rows = [{"q": f"What is {i} + {i}?", "sum": 2 * i, "broken": BROKEN} for i in range(1, 13)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "run").mkdir()
    return RunConfig(
        model=tmp_path / "model",
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


def test_a_reward_function_that_always_fails_ends_the_run_with_its_message(
    config: RunConfig, server: ScriptedServer, gloo_group: dist.ProcessGroup
) -> None:
    reward = config.reward.model_copy(update={"scorer": "tests.support.reward_functions:bad", "max_failed_share": 0.02})
    with RolloutSource(
        config.model_copy(update={"reward": reward}), rank=0, gloo_group=gloo_group, timer=PhaseTimer()
    ) as source:
        start(source, server)
        with pytest.raises(RewardError, match=r"3 of the last 100 groups got no reward \(3 reward_error\).*KeyError"):
            source.next_batch()

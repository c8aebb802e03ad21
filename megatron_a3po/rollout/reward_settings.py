"""From the configuration to what rewards are computed with."""

from megatron_a3po.config import RunConfig
from megatron_a3po.rollout.rewards.pool import PoolSettings
from megatron_a3po.rollout.rewards.scorers import ScorerSpec, TaskSpec
from megatron_a3po.rollout.rewards.shaping import Shaping


def pool_settings(config: RunConfig) -> PoolSettings:
    reward, data = config.reward, config.data
    task = TaskSpec(name=data.task, options=data.task_options) if data.task is not None else None
    scorer = reward.scorer
    if scorer == "auto":
        scorer = "task" if task is not None else "math"
    return PoolSettings(
        spec=ScorerSpec(scorer=scorer, task=task, format_pattern=reward.format_pattern),
        max_workers=reward.max_workers,
        timeout_seconds=reward.timeout_seconds,
        memory_bytes=reward.worker_memory_bytes,
        log_file=config.run_dir / "logs" / "rewards.log",
    )


def shaping(config: RunConfig) -> Shaping:
    return Shaping(
        max_new_tokens=config.rollout.max_new_tokens,
        format_penalty=config.reward.format_penalty,
        length_penalty=config.reward.length_penalty,
    )

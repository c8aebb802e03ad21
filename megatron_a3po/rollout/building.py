"""From the configuration to the parts that sample and reward."""

import json
from pathlib import Path

from megatron_a3po.config import RunConfig
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.prompts.prompts import PromptSet
from megatron_a3po.rewards.scorers import ScorerSpec, TaskSpec
from megatron_a3po.rewards.worker_pool import PoolSettings
from megatron_a3po.rollout.evaluator import EVALUATIONS, Evaluator
from megatron_a3po.rollout.rewarder import Rewarder
from megatron_a3po.rollout.sampler import Decoder, Sampler, Sampling
from megatron_a3po.rollout.shaping import Shaping


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


def make_sampler(config: RunConfig, pool: ServerPool, tokenizer: Decoder) -> Sampler:
    rollout = config.rollout
    return Sampler(
        pool,
        tokenizer,
        Sampling(
            num_samples=rollout.group_size, max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature
        ),
        max_in_flight=rollout.max_concurrent_groups * rollout.group_size,
        stop_token_ids=stop_token_ids(config.model, tokenizer),
    )


def stop_token_ids(model: Path, tokenizer: Decoder) -> frozenset[int]:
    """At which SGLang ends a response: those of the tokenizer, of config.json and of generation_config.json, and
    Llama 3's end of a message."""
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    ids = [getattr(tokenizer, "eos_token_id", None), added.get("<|eom_id|>")]
    for name in ("config.json", "generation_config.json"):
        if (model / name).exists():
            found = json.loads((model / name).read_bytes()).get("eos_token_id")
            ids += found if isinstance(found, list) else [found]
    return frozenset(token for token in ids if token is not None)


def make_evaluator(config: RunConfig, prompts: PromptSet, sampler: Sampler, rewarder: Rewarder) -> Evaluator:
    """`evaluation` where it says something, else as in training."""
    chosen, training = config.evaluation, sampler.sampling
    sampling = Sampling(
        num_samples=chosen.num_samples,
        max_new_tokens=chosen.max_new_tokens or training.max_new_tokens,
        temperature=training.temperature if chosen.temperature is None else chosen.temperature,
    )
    return Evaluator(prompts.evaluation, sampler, rewarder, sampling, config.run_dir / EVALUATIONS)

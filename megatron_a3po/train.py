"""The training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_a3po.actor import build_actor
from megatron_a3po.algorithm.advantage import grpo_advantages
from megatron_a3po.config import PublishConfig, RunConfig
from megatron_a3po.errors import PublishError
from megatron_a3po.parallel.layout import RankInfo, init_distributed
from megatron_a3po.rollout.source import RolloutSource
from megatron_a3po.runtime.metrics import batch_metrics
from megatron_a3po.runtime.recorder import RunRecorder
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.gather import gather_hf_tensors
from megatron_a3po.weights.publisher import WeightPublisher

if TYPE_CHECKING:
    from megatron_a3po.actor.actor import PolicyActor


def train(config: RunConfig) -> None:
    """Train by A-3PO: sample ahead of the trainer, learn from slightly stale responses, publish after every step.

    Collective over the ranks that torchrun started; `config.run_dir` must exist (`runtime.run_dir.claim_run_dir`).
    """
    info, timer = RankInfo.from_environment(), PhaseTimer()
    recorder = RunRecorder(config.run_dir, num_steps=config.num_steps, rank=info.rank, timer=timer)
    init_distributed(info, config.device, config.actor.collective_timeout_seconds)

    with RolloutSource(config, rank=info.rank, timer=timer) as rollouts:
        recorder.message("building the actors")
        actor = build_actor(config, device=torch.device(config.device), timer=timer)
        recorder.message("waiting for the rollout servers")
        servers = rollouts.connect()

        def gather() -> list[tuple[str, torch.Tensor]]:
            return gather_hf_tensors(actor.model.chunks, actor.model.bridge, actor.model.vocab_size)

        backend = "gloo" if config.device == "cpu" else "nccl"
        with WeightPublisher(config.publish, gather, servers, backend=backend, timer=timer) as publisher:

            def publish() -> dict[str, float]:
                publisher.publish(actor.version)
                rollouts.set_version(actor.version)
                return verify(config.publish, rollouts, actor)

            every = config.evaluation.every_steps
            recorder.step(0, publish() | {"eval_accuracy": rollouts.evaluate()})
            for step in range(1, config.num_steps + 1):
                batch = rollouts.next_batch()
                rewards = torch.tensor([trajectory.reward for trajectory in batch])
                advantages = grpo_advantages(rewards, torch.tensor([trajectory.group_id for trajectory in batch]))
                metrics = actor.train_step(batch, advantages.values)
                metrics |= publish()
                if step == config.num_steps or (every > 0 and step % every == 0):
                    metrics["eval_accuracy"] = rollouts.evaluate()
                recorder.step(step, metrics | batch_metrics(batch, advantages, version=step - 1))
        recorder.finish(rollouts.ledger_counts())


def verify(config: PublishConfig, rollouts: RolloutSource, actor: PolicyActor) -> dict[str, float]:
    """Compare the trainer's log-probs with the servers' under the weights just published. Raises PublishError."""
    if config.verify_prompts == 0:
        return {}
    difference = actor.logprob_difference(rollouts.sample_fresh(config.verify_prompts))
    limit = config.max_logprob_difference
    if limit is not None and not difference <= limit:
        raise PublishError(
            f"version {actor.version}: trainer and rollout server differ by {difference:.2e} in a token's log-prob, over "
            f"publish.max_logprob_difference = {limit:.1e}; the server does not compute with the published weights"
        )
    return {"logprob_difference_max": difference}

"""Run the training loop."""

import torch

from megatron_a3po.actor import build_actor
from megatron_a3po.algorithm.advantage import Advantages, compute_advantages, overlong_penalty
from megatron_a3po.checkpoint.manager import CheckpointManager
from megatron_a3po.config import RunConfig
from megatron_a3po.hf.export import save_hf_folder
from megatron_a3po.parallel.layout import RankInfo, init_distributed
from megatron_a3po.preflight.load import to_yaml
from megatron_a3po.rollout.source import RolloutSource
from megatron_a3po.runtime.metrics import batch_metrics
from megatron_a3po.runtime.recorder import RunRecorder
from megatron_a3po.runtime.run_dir import claim_run_dir
from megatron_a3po.runtime.signals import Preemption
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.types import Trajectory
from megatron_a3po.weights.build import build_publisher


def train(config: RunConfig, preemption: Preemption | None = None) -> None:
    """Train by A-3PO: sample ahead of the trainer, learn from slightly stale responses, publish after every step.

    Collective over the ranks that torchrun started. Resumes from the checkpoint that `config.resume` chooses. The run
    leaves config.resolved.yaml, metrics.jsonl, summary.json, report.html, tensorboard/, logs/, checkpoints/,
    evaluations/ and exported models in `config.run_dir`. Raises Preempted if `preemption` has asked a rank to stop.
    """
    preemption = preemption or Preemption()
    info, timer = RankInfo.from_environment(), PhaseTimer()
    if info.rank == 0:
        claim_run_dir(config.run_dir, to_yaml(config), resume=config.resume != "none")
    gloo_group = init_distributed(info, config.device, config.actor.collective_timeout_seconds)
    checkpoints = CheckpointManager(config, gloo_group, timer)
    resumed_step = checkpoints.choose()
    recorder = RunRecorder(config, rank=info.rank, timer=timer, resumed_step=resumed_step)

    with RolloutSource(config, rank=info.rank, gloo_group=gloo_group, timer=timer, preemption=preemption) as rollouts:
        recorder.message(f"run folder {config.run_dir}; building {info.world_size} actors")
        actor = build_actor(config, device=torch.device(config.device), timer=timer)
        fleet = rollouts.connect(recorder.message)
        rollouts.restore(checkpoints.load(actor))

        model = actor.model
        with build_publisher(config, model.chunks, model.groups, fleet, gloo_group, timer=timer) as publisher:

            def publish() -> dict[str, float]:
                published = publisher.publish(actor.version)
                rollouts.set_version(actor.version)
                return published | actor.compare_logprobs(rollouts.sample_for_comparison())

            recorder.start(publish(), rollouts.evaluate(0) if resumed_step == 0 else None)
            for step in range(resumed_step + 1, config.num_steps + 1):
                batch = rollouts.next_batch()
                if rollouts.stopped_by:
                    checkpoints.save_before_end(step - 1, actor, rollouts.state)
                    preemption.end_run(step - 1, rollouts.stopped_by)
                advantages = batch_advantages(batch, config)
                metrics = actor.train_step(batch, advantages.values) | batch_metrics(batch, advantages, step - 1)
                metrics |= publish() | rollouts.metrics()
                if config.evaluation.is_due(step, config.num_steps):
                    metrics |= rollouts.evaluate(step)
                recorder.step(step, metrics)
                # Export before the checkpoint, so that a run killed in between makes the step and its exports again.
                for name in config.checkpoint.exports(step, config.num_steps):
                    save_hf_folder(publisher.tensors(), config.model, config.run_dir / name, rank=info.rank)
                checkpoints.save_if_due(step, actor, rollouts.state)
        recorder.finish(rollouts.ledger_counts())


def batch_advantages(batch: list[Trajectory], config: RunConfig) -> Advantages:
    """Turn the rewards of a batch, with the penalty for overlong responses, into advantages."""
    lengths = torch.tensor([trajectory.response_length for trajectory in batch])
    rewards = torch.tensor([trajectory.reward for trajectory in batch])
    rewards += overlong_penalty(lengths, config.rollout.max_new_tokens, config.algorithm.overlong_buffer_tokens)
    group_ids = torch.tensor([trajectory.group_id for trajectory in batch])
    return compute_advantages(rewards, group_ids, config.algorithm.advantage)

"""Run Megatron's distributed optimizer and its learning-rate schedule. All ranks take or skip a step together."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_a3po.actor.precision import parameter_dtype
from megatron_a3po.config import OptimizerConfig, RunConfig
from megatron_a3po.errors import TrainingError


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one optimizer step, equal on every rank."""

    gradient_norm: float
    """before clipping; not finite if that is why the step was skipped"""
    learning_rate: float
    updated: bool


class PolicyOptimizer:
    """AdamW over the chunks' float32 gradients, its state sharded over the ranks that share parameters."""

    def __init__(self, config: RunConfig, chunks: list[torch.nn.Module], groups: ProcessGroupCollection) -> None:
        self._config = config.optimizer
        self._chunks = chunks
        self.megatron: Any = get_megatron_optimizer(
            _megatron_config(config), chunks, use_gloo_process_groups=False, pg_collection=groups
        )
        self.schedule = build_schedule(self.megatron, config.optimizer, config.num_steps * config.actor.minibatches)
        self.skipped_in_a_row = 0

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.megatron.zero_grad()

    def step(self) -> StepResult:
        """Clip the gradient and make a step, or skip the step if the gradient is not finite. Collective.

        The schedule moves on in both cases. Raises TrainingError after more than optimizer.max_skipped_steps skipped
        steps in a row.
        """
        learning_rate = self._next_learning_rate()
        gradient_norm = self._gradient_norm()
        if math.isfinite(gradient_norm):
            updated, _, _ = self.megatron.step()
        else:
            updated = False
        self.skipped_in_a_row = 0 if updated else self.skipped_in_a_row + 1
        if self.skipped_in_a_row > self._config.max_skipped_steps:
            raise TrainingError(
                f"{self.skipped_in_a_row} optimizer steps in a row had a gradient that is not finite (the last norm: "
                f"{gradient_norm}; optimizer.max_skipped_steps = {self._config.max_skipped_steps}). The weights are "
                "those of the last good step. Lower optimizer.learning_rate, or look at the rewards and log-probs"
            )
        return StepResult(gradient_norm, learning_rate, updated)

    def skip(self) -> StepResult:
        """Make no step, for a minibatch without loss tokens: Adam would move the weights by momentum alone."""
        return StepResult(0.0, self._next_learning_rate(), False)

    def finish_parameter_gather(self) -> None:
        """Gather all parameters of the last step now. With overlap, the next forward pass would do it."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:  # type: ignore[union-attr]
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]

    def _next_learning_rate(self) -> float:
        # Move before the step: otherwise the first step of a warm-up would have a rate of 0.
        self.schedule.step(1)
        return self.schedule.get_lr({})

    def _gradient_norm(self) -> float:
        """Return the norm over all parameters, equal on every rank; not finite if it is not finite on any rank."""
        # Megatron's step does not check the norm: with NaN, every weight would become NaN. It computes the norm once
        # more, which costs one pass over the gradients.
        self.megatron.prepare_grads()
        norm = self.megatron.get_grad_norm()
        worst = torch.tensor(float(norm), dtype=torch.float64, device=torch.cuda.current_device())
        worst = worst.nan_to_num(math.inf, posinf=math.inf)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)


def build_schedule(optimizer: Any, config: OptimizerConfig, num_steps: int) -> OptimizerParamScheduler:
    """Build a schedule that rises linearly from 0 over the warm-up and then falls to `min_learning_rate`.

    It reaches the minimum at step `num_steps` + 1. If it did so earlier, the last step would change nothing with a
    minimum of zero.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if config.warmup_steps else config.learning_rate,
        max_lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(num_steps, config.warmup_steps) + 1,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=num_steps,
        wd_incr_style="constant",
    )


def _megatron_config(config: RunConfig) -> MegatronOptimizerConfig:
    optimizer = config.optimizer
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.learning_rate,
        min_lr=optimizer.min_learning_rate,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad_norm,
        bf16=config.precision != "fp32",
        fp16=False,
        params_dtype=parameter_dtype(config.precision),
        fp8_recipe=config.fp8.recipe if config.precision == "fp8" else None,
        use_distributed_optimizer=True,
        # Megatron offloads only the state of its precision-aware optimizer.
        optimizer_cpu_offload=optimizer.offload,
        optimizer_offload_fraction=1.0 if optimizer.offload else 0.0,
        use_precision_aware_optimizer=optimizer.offload,
    )

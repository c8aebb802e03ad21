"""Train the policy: one or several optimizer steps per batch of trajectories."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from megatron_a3po.actor.forward_step import run_microbatches
from megatron_a3po.actor.fusions import detect_fusions
from megatron_a3po.actor.head import PolicyHead
from megatron_a3po.actor.megatron_state import TrainingStateSave, load_training_state, plan_save
from megatron_a3po.actor.model import PolicyModel, build_model
from megatron_a3po.actor.optimizer import PolicyOptimizer, StepResult
from megatron_a3po.actor.precision import refuse_missing_fp8
from megatron_a3po.actor.start_weights import ReferenceWeights
from megatron_a3po.actor.summary import startup_summary
from megatron_a3po.algorithm.diagnostics import Totals, combine_numbers, combine_tensors
from megatron_a3po.algorithm.objective import MAXIMUM_NAMES, PROXIMAL_SECONDS, SUM_NAMES, Objective
from megatron_a3po.batching.balance import assign_microbatches
from megatron_a3po.batching.packing import pack, split_groups
from megatron_a3po.config import RunConfig
from megatron_a3po.errors import PublishError, TrainingError
from megatron_a3po.parallel.reduce import reduce_named, sum_over_group
from megatron_a3po.preflight.check_layout import token_multiple
from megatron_a3po.preflight.load import load_architecture
from megatron_a3po.preflight.memory import choose_output_layer
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.types import Alignment, Microbatch, Trajectory

_DIFFERENCE = "logprob_difference"


class PolicyActor:
    """This rank's part of the policy. All methods are collective; every rank calls them with the same arguments."""

    def __init__(self, config: RunConfig, *, device: torch.device, timer: PhaseTimer) -> None:
        self._config = config
        self._device = device
        self._timer = timer
        self.version = 0
        """Weight version: the number of training steps so far. A publication follows each of them."""
        fusions = detect_fusions()
        if config.precision == "fp8":
            capability = torch.cuda.get_device_capability() if device.type == "cuda" else None
            refuse_missing_fp8(config.fp8, fusions.transformer_engine, capability)
        self._architecture = load_architecture(config.model)
        for line in startup_summary(config, self._architecture, fusions, world_size=torch.distributed.get_world_size()):
            logger.info(line)
        self.model: PolicyModel = build_model(config, fusions)
        groups = self.model.groups
        self.optimizer = PolicyOptimizer(config, self.model.chunks, groups)
        self.objective = Objective(**config.objective_options(), sum_over_ranks=sum_over_group(groups.cp))
        self._reference = ReferenceWeights(self.model.chunks) if config.algorithm.kl_coefficient > 0 else None
        self._head = self._build_head()
        self._alignment = Alignment(
            context_size=groups.cp.size(),
            context_rank=groups.cp.rank(),
            rank_multiple=token_multiple(config),
        )

    def _build_head(self) -> PolicyHead:
        config, model = self._config, self.model
        output_layer = choose_output_layer(config, self._architecture)
        if output_layer == "fused" and self._device.type == "cuda":
            # Triton needs a driver to define kernels, so import this only where there is a GPU.
            from megatron_a3po.parallel.triton_logprobs import check_kernel

            check_kernel(self._device)
        return PolicyHead(
            tp_group=model.groups.tp,
            vocab_size=model.vocab_size,
            temperature=config.rollout.temperature,
            output_layer=output_layer,
            with_entropy=config.algorithm.entropy_coefficient > 0,
        )

    def train_step(self, trajectories: Sequence[Trajectory], advantages: Tensor) -> dict[str, float]:
        """Make an optimizer step on each minibatch and count the version up by one.

        advantages [trajectories] float32. Returns metrics, equal on every rank. Raises TrainingError before the step of
        a minibatch if an advantage or too many log-probs are not finite, and after too many steps in a row with a
        gradient that is not finite.
        """
        self._refuse_broken(trajectories, advantages)
        with self._timer.phase("train"):
            minibatches = self._with_forward_passes(self._minibatches(trajectories, advantages))
            steps: list[StepResult] = []
            totals: list[Totals[float]] = []
            for number, microbatches in enumerate(minibatches):
                totals.append(self._forward_backward(microbatches, fresh_staleness=min(number, 1)))
                part = self.objective.metrics(totals[-1])
                self._refuse_nonfinite(part)
                steps.append(self.optimizer.step() if part["loss_tokens"] else self.optimizer.skip())
            self.optimizer.finish_parameter_gather()
        self.version += 1
        return self.objective.metrics(combine_numbers(totals)) | {
            "gradient_norm": max(step.gradient_norm for step in steps),
            "learning_rate": steps[-1].learning_rate,
            "skipped_steps": sum(not step.updated for step in steps),
            "num_microbatches": sum(map(len, minibatches)),
        }

    def _refuse_broken(self, trajectories: Sequence[Trajectory], advantages: Tensor) -> None:
        for trajectory, advantage in zip(trajectories, advantages.tolist(), strict=True):
            if not math.isfinite(advantage):
                raise TrainingError(
                    f"the advantage of trajectory {trajectory.prompt_id} is {advantage}; look at the reward function"
                )

    def plan_save(self, folder: Path) -> TrainingStateSave:
        """Plan how weights, optimizer and version are written into an empty folder that all ranks see."""
        return plan_save(folder, self.model, self.optimizer, self.version)

    def load(self, folder: Path, *, same_layout: bool) -> None:
        """Load what a save wrote. `same_layout`: whether the parallel layout is that of the save."""
        self.version = load_training_state(folder, self.model, self.optimizer, same_layout=same_layout)

    def compare_logprobs(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the largest |trainer's log-prob - server's log-prob| over the response tokens, as a metric.

        Without trajectories, returns no metric. Raises PublishError if another version sampled a token, or if the
        difference exceeds publish.max_logprob_difference.
        """
        if not trajectories:
            return {}
        for trajectory in trajectories:
            if bool((trajectory.weight_versions != self.version).any()):
                versions = trajectory.weight_versions.unique().tolist()
                raise PublishError(
                    f"a server samples with versions {versions} after version {self.version} was published"
                )
        with self._timer.phase("verify"):
            difference = self._logprob_difference(trajectories)
        limit = self._config.publish.max_logprob_difference
        if limit is not None and not difference <= limit:
            raise PublishError(
                f"version {self.version}: trainer and rollout server differ by {difference:.2e} in a token's log-prob, "
                f"over publish.max_logprob_difference = {limit:.1e}: the server computes with other weights"
            )
        return {"logprob_difference_max": difference}

    def _logprob_difference(self, trajectories: Sequence[Trajectory]) -> float:
        microbatches = self._microbatches(trajectories, torch.zeros(len(trajectories)))

        def difference(logprobs: Tensor, _entropy: Tensor, microbatch: Microbatch) -> tuple[Tensor, Totals[Tensor]]:
            apart = (logprobs - microbatch.behaviour_logprobs).abs()
            largest = torch.where(microbatch.loss_mask, apart.nan_to_num(math.inf, posinf=math.inf), 0.0).amax()
            return logprobs.sum(), Totals(maxima={_DIFFERENCE: largest.double()})

        reports = self._run(microbatches, difference, forward_only=True)
        return self._reduce(reports, sums=(), maxima=(_DIFFERENCE,)).maxima[_DIFFERENCE]

    def _minibatches(self, trajectories: Sequence[Trajectory], advantages: Tensor) -> list[list[Microbatch]]:
        """Pack this data-parallel rank's share of each minibatch."""
        parts = split_groups([trajectory.group_id for trajectory in trajectories], self._config.actor.minibatches)
        return [self._microbatches([trajectories[index] for index in part], advantages[part]) for part in parts]

    def _microbatches(self, trajectories: Sequence[Trajectory], advantages: Tensor) -> list[Microbatch]:
        """Pack this data-parallel rank's share of the trajectories."""
        groups, actor = self.model.groups, self._config.actor
        lengths = [self._alignment.aligned(trajectory.token_ids.numel() - 1) for trajectory in trajectories]
        interleaved = len(self.model.chunks) > 1
        share = assign_microbatches(
            lengths,
            [self._architecture.forward_flops(length) for length in lengths],
            max_tokens=actor.microbatch_tokens * groups.cp.size(),
            num_ranks=groups.dp.size(),
            multiple_of=groups.pp.size() if interleaved else 1,
            oversized=actor.oversized,
        )[groups.dp.rank()]
        return [
            pack(
                [trajectories[index] for index in indices],
                advantages[indices],
                alignment=self._alignment,
                device=self._device,
            )
            for indices in share
        ]

    def _with_forward_passes(self, minibatches: list[list[Microbatch]]) -> list[list[Microbatch]]:
        """Add the log-probs that the objective needs, by the weights before the first step or the reference's."""
        self.objective.proximal_seconds = 0.0
        if self.objective.needs_recomputed_logprobs:
            # Count the time only if this is the proximal policy. A comparison is not a cost of the method.
            counted = (
                self.objective.counting_proximal_seconds() if self._config.proximal == "recompute" else nullcontext()
            )
            with counted:
                minibatches = self._with_logprobs(minibatches, "recomputed_logprobs")
        if self._reference is not None:
            with self._reference.in_place():
                minibatches = self._with_logprobs(minibatches, "reference_logprobs")
        return minibatches

    def _with_logprobs(self, minibatches: list[list[Microbatch]], field: str) -> list[list[Microbatch]]:
        reports = self._run(
            list(itertools.chain(*minibatches)),
            lambda logprobs, _entropy, _microbatch: (logprobs.sum(), logprobs.clone()),
            forward_only=True,
        )
        # Only the last stage has reports, and only the last stage computes the loss.
        if not reports:
            return minibatches
        remaining = iter(reports)
        return [
            [dataclasses.replace(microbatch, **{field: next(remaining)}) for microbatch in microbatches]
            for microbatches in minibatches
        ]

    def _forward_backward(self, microbatches: list[Microbatch], *, fresh_staleness: int) -> Totals[float]:
        """Leave the gradient of the minibatch in the model, and return the objective's totals over it."""
        self.optimizer.zero_grad()
        reports = self._run(
            microbatches,
            lambda logprobs, entropy, microbatch: self.objective(
                logprobs, entropy, microbatch, self.version, fresh_staleness
            ),
            forward_only=False,
        )
        if reports:
            spent = torch.tensor(self.objective.proximal_seconds, dtype=torch.float64, device=self._device)
            reports = [*reports, Totals(maxima={PROXIMAL_SECONDS: spent})]
        return self._reduce(reports, sums=SUM_NAMES, maxima=MAXIMUM_NAMES)

    def _refuse_nonfinite(self, metrics: dict[str, float]) -> None:
        limit = self._config.algorithm.max_nonfinite_share
        share = metrics["nonfinite_tokens"] / max(metrics["loss_tokens"], 1.0)
        if share > limit:
            raise TrainingError(
                f"step {self.version + 1}: the log-probs of {share:.1%} of the loss tokens are not finite (limit "
                f"algorithm.max_nonfinite_share = {limit:.1%}); the weights or the servers' answers are broken"
            )

    def _run(self, microbatches: list[Microbatch], loss_function, *, forward_only: bool):  # type: ignore[no-untyped-def]
        return run_microbatches(self.model.chunks, microbatches, self._head, loss_function, forward_only=forward_only)

    def _reduce(
        self, reports: Sequence[Totals[Tensor]], *, sums: Sequence[str], maxima: Sequence[str]
    ) -> Totals[float]:
        """Combine the reports of all microbatches on all ranks. Stages other than the last pass none."""
        local = combine_tensors(reports)
        total, largest = reduce_named(
            (local.sums, local.maxima) if reports else None,
            sums=sums,
            maxima=maxima,
            data_group=self.model.groups.dp_cp,
            pipeline_group=self.model.groups.pp,
            device=self._device,
        )
        return Totals(sums=total, maxima=largest)

"""The policy that is trained: one optimizer step per batch of trajectories."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_a3po.actor.forward_step import run_microbatches
from megatron_a3po.actor.head import PolicyHead, choose_output_layer
from megatron_a3po.actor.model import PolicyModel, build_model
from megatron_a3po.actor.objective import NUM_MAXIMA, NUM_SUMS, Objective
from megatron_a3po.actor.optimizer import build_optimizer
from megatron_a3po.actor.precision import parameter_dtype
from megatron_a3po.actor.reference import ReferenceWeights
from megatron_a3po.config import RunConfig
from megatron_a3po.data.packing import assign_microbatches, pack
from megatron_a3po.errors import PublishError, TrainingError
from megatron_a3po.parallel.reduce import reduce_statistics
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.types import Microbatch, Trajectory


class PolicyActor:
    """This rank's part of the policy. All methods are collective: every rank calls them with the same trajectories."""

    def __init__(self, config: RunConfig, *, device: torch.device, timer: PhaseTimer) -> None:
        self._config = config
        self._device = device
        self._timer = timer
        self.version = 0
        """Weight version: the number of optimizer steps so far."""
        self.model: PolicyModel = build_model(
            config.model,
            config.parallel,
            config.precision,
            seed=config.seed,
            timeout_seconds=config.actor.collective_timeout_seconds,
        )
        self.optimizer = build_optimizer(config.optimizer, config.precision, self.model.chunks)
        self.objective = Objective(config)
        self._reference = ReferenceWeights(self.model.chunks) if config.algorithm.kl_coefficient > 0 else None
        self._head = self._build_head()

    def _build_head(self) -> PolicyHead:
        config, model = self._config, self.model
        output_layer, why = choose_output_layer(
            config.actor.output_layer,
            tokens=config.actor.microbatch_tokens,
            columns=model.padded_vocab_size // model.groups.tp.size(),
            item_bytes=parameter_dtype(config.precision).itemsize,
        )
        logger.info(why)
        if output_layer == "fused" and self._device.type == "cuda":
            # Triton asks for a driver when its kernels are defined, so not where there is no GPU.
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
        """One optimizer step on the whole batch; the version goes up by one. Returns metrics, equal on every rank.

        advantages [trajectories] float32. Raises TrainingError, before the weights change, when too many log-probs or
        the gradient are not finite.
        """
        with self._timer.phase("train"):
            microbatches = self._with_forward_passes(self._microbatches(trajectories, advantages))
            metrics = self._forward_backward(microbatches)
            self._refuse_nonfinite(metrics)
            metrics["gradient_norm"] = self._optimizer_step()
        self.version += 1
        return metrics | {"num_microbatches": len(microbatches), "learning_rate": self._config.optimizer.learning_rate}

    def compare_logprobs(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Largest |trainer's log-prob - server's log-prob| over response tokens, which this version must have sampled.

        Raises PublishError for a token of another version, and for a difference over the configured limit. No
        trajectories, no comparison.
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

        def difference(logprobs: Tensor, _entropy: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
            apart = (logprobs - microbatch.behaviour_logprobs).abs()
            largest = torch.where(microbatch.loss_mask, apart.nan_to_num(math.inf), 0.0).amax()
            return logprobs.sum(), largest.double()[None]

        reports = self._run(microbatches, difference, forward_only=True)
        nothing = torch.zeros(0, dtype=torch.float64, device=self._device)
        local = (nothing, torch.stack(reports).amax(0)) if reports else None
        _, (largest,) = self._reduce(local, num_sums=0, num_maxima=1)
        return largest

    def _microbatches(self, trajectories: Sequence[Trajectory], advantages: Tensor) -> list[Microbatch]:
        """This data-parallel rank's share, packed."""
        groups = self.model.groups
        lengths = [trajectory.token_ids.numel() - 1 for trajectory in trajectories]
        share = assign_microbatches(lengths, self._config.actor.microbatch_tokens, groups.dp.size())[groups.dp.rank()]
        return [
            pack(
                [trajectories[index] for index in indices],
                advantages[indices],
                multiple_of=groups.tp.size(),
                device=self._device,
            )
            for indices in share
        ]

    def _with_forward_passes(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """Add the log-probs that the objective needs beside the training forward."""
        self.objective.proximal_seconds = 0.0
        if self.objective.needs_recomputed_logprobs:
            with self.objective.counting_proximal_seconds():
                microbatches = self._with_logprobs(microbatches, "recomputed_logprobs")
        if self._reference is not None:
            with self._reference.in_place():
                microbatches = self._with_logprobs(microbatches, "reference_logprobs")
        return microbatches

    def _with_logprobs(self, microbatches: list[Microbatch], field: str) -> list[Microbatch]:
        reports = self._run(
            microbatches, lambda logprobs, _entropy, _microbatch: (logprobs.sum(), logprobs.clone()), forward_only=True
        )
        # Only the last stage has them, and only the last stage computes the loss.
        if not reports:
            return microbatches
        return [
            dataclasses.replace(microbatch, **{field: logprobs})
            for microbatch, logprobs in zip(microbatches, reports, strict=True)
        ]

    def _forward_backward(self, microbatches: list[Microbatch]) -> dict[str, float]:
        """Leaves the gradient of the batch in the model; returns the loss's diagnostics over the whole batch."""
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        reports = self._run(
            microbatches,
            lambda logprobs, entropy, microbatch: self.objective(logprobs, entropy, microbatch, self.version),
            forward_only=False,
        )
        local = None
        if reports:
            largest = torch.stack([maxima for _, maxima in reports]).amax(0)
            spent = largest.new_tensor([self.objective.proximal_seconds])
            local = torch.stack([sums for sums, _ in reports]).sum(0), torch.cat([largest, spent])
        sums, (*maxima, seconds) = self._reduce(local, num_sums=NUM_SUMS, num_maxima=NUM_MAXIMA + 1)
        return self.objective.metrics(sums, maxima) | {"proximal_seconds": seconds}

    def _refuse_nonfinite(self, metrics: dict[str, float]) -> None:
        limit = self._config.algorithm.max_nonfinite_share
        share = metrics["nonfinite_tokens"] / max(metrics["loss_tokens"], 1.0)
        if share > limit:
            raise TrainingError(
                f"step {self.version + 1}: the log-probs of {share:.1%} of the loss tokens are not finite (limit "
                f"algorithm.max_nonfinite_share = {limit:.1%}); the weights or the servers' answers are broken"
            )

    def _optimizer_step(self) -> float:
        """Clip, step, and gather the updated parameters. Returns the gradient norm before clipping."""
        updated, gradient_norm, _ = self.optimizer.step()
        if not updated or not math.isfinite(gradient_norm):
            raise TrainingError(
                f"step {self.version + 1}: gradient norm {gradient_norm}; these weights are not published"
            )
        return float(gradient_norm)

    def _run(self, microbatches: list[Microbatch], loss_function, *, forward_only: bool):  # type: ignore[no-untyped-def]
        return run_microbatches(self.model.chunks, microbatches, self._head, loss_function, forward_only=forward_only)

    def _reduce(
        self, local: tuple[Tensor, Tensor] | None, *, num_sums: int, num_maxima: int
    ) -> tuple[list[float], list[float]]:
        return reduce_statistics(
            local,
            num_sums=num_sums,
            num_maxima=num_maxima,
            data_group=self.model.groups.dp,
            pipeline_group=self.model.groups.pp,
            device=self._device,
        )

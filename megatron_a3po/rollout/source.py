"""Rollouts as the training loop sees them: every rank gets the batch that rank 0 collected."""

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_a3po.config import RunConfig
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.parallel.broadcast import broadcast_trajectories
from megatron_a3po.rollout.rank_zero import RankZeroRollouts
from megatron_a3po.rollout.state import RolloutState
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.signals import Preemption
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.types import Trajectory

_CHECK_TOKENS = 16
"""Length of a response for the comparison of log-probs, which the trainer waits for after every publication."""


class RolloutSource:
    """The source of training batches and evaluations on every rank. A context manager.

    Rank 0 has all parts (`RankZeroRollouts`); the other ranks receive.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        rank: int,
        gloo_group: dist.ProcessGroup,
        timer: PhaseTimer,
        preemption: Preemption | None = None,
        look_seconds: float = 1.0,
    ) -> None:
        """Prepare the parts.

        Args:
            gloo_group: the gloo group of all ranks, in which ranks wait for rank 0.
            look_seconds: how long rank 0 waits for a batch before all ranks check whether one was asked to stop.
        """
        self._config = config
        self._preemption = preemption or Preemption()
        self._gloo_group = gloo_group
        self._look_seconds = look_seconds
        self._timer = timer
        self._stack = ExitStack()
        self.stopped_by = 0
        """Number of the signal that asked a rank to stop, once all ranks know it; 0: none"""
        self._rank0 = RankZeroRollouts(config) if rank == 0 else None

    def __enter__(self) -> Self:
        if self._rank0 is not None:
            self._stack.enter_context(self._rank0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def connect(self, say: Callable[[str], None]) -> Fleet | None:
        """Wait for the servers, and return them as the publisher needs them, on rank 0. Collective.

        `say` reports progress. Raises RewardError, RolloutError.
        """
        fleet = self._rank0.connect(say) if self._rank0 is not None else None
        dist.barrier(group=self._gloo_group)
        return fleet

    def state(self) -> RolloutState | None:
        """Return all that a resumed run needs of the rollouts at this moment; None on ranks other than 0.

        Generation goes on. Groups that complete later are in flight in the state, and a run that is resumed from it
        samples them again; see `RolloutState`.
        """
        return self._rank0.state() if self._rank0 is not None else None

    def restore(self, state: RolloutState | None) -> None:
        """Continue where rank 0 took `state`. It is None on other ranks and for a new run.

        Call it before the first `set_version`, which then gets the version of the state. Raises ConfigError if the
        state does not fit the configuration, and DataError if its prompts are others.
        """
        if self._rank0 is not None and state is not None:
            self._rank0.restore(state)

    def set_version(self, version: int) -> None:
        """Set the version that servers sample with from now on and that the next batch is trained at.

        The first call, after the first publication, starts the collection. Raises VersionError if the first version is
        neither the restored one nor, for a new run, 0.
        """
        if self._rank0 is not None:
            self._rank0.set_version(version)

    def next_batch(self) -> list[Trajectory]:
        """Return the next batch in issue order on every rank. Every token's age has been checked. Collective.

        If a rank was asked to stop, the batch is empty, nothing was taken, and `stopped_by` is the signal. Raises
        whatever ended the collection, and VersionError.
        """
        with self._timer.phase("wait"):
            self._wait_for_batch()
            if self.stopped_by:
                return []
            batch = self._broadcast(self._rank0.take_batch() if self._rank0 is not None else None)
        return batch

    def _wait_for_batch(self) -> None:
        """Wait until the batch is complete or a rank was asked to stop. All ranks learn both in the same collective."""
        is_complete = False
        while not is_complete and not self.stopped_by:
            waits = self._rank0 is not None and not self._rank0.is_batch_complete(self._look_seconds)
            seen = torch.tensor([waits, self._preemption.look()])
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self._gloo_group)
            is_complete, self.stopped_by = not seen[0], int(seen[1])

    def sample_for_comparison(self) -> list[Trajectory]:
        """Sample `publish.verify_prompts` held-out prompts by the present version, for every rank. Collective."""
        num_prompts = self._config.publish.verify_prompts
        if num_prompts == 0:
            return []
        with self._timer.phase("verify"):
            num_tokens = min(_CHECK_TOKENS, self._config.rollout.max_new_tokens)
            return self._broadcast(self._rank0.sample_for_comparison(num_prompts, num_tokens) if self._rank0 else None)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the present version on all evaluation datasets, and return the metrics; none on ranks other than 0.

        `eval_accuracy` is the mean reward on the first dataset. Responses go to `run_dir/evaluations/step_...`.
        """
        if self._rank0 is None:
            return {}
        with self._timer.phase("evaluate"):
            results = self._rank0.evaluate(f"step_{step:08d}")
        if len(results) > 1 or results[0].num_samples > 1:
            logger.info("evaluation after step %d: %s", step, "; ".join(map(str, results)))
        metrics = {"eval_accuracy": results[0].average}
        for result in results:
            metrics |= result.metrics()
        return metrics

    def metrics(self) -> dict[str, float]:
        """Return the number of groups dropped so far by reason; nothing on ranks other than 0."""
        dropped = self._rank0.ledger.dropped if self._rank0 is not None else {}
        return {f"dropped/{reason}": number for reason, number in dropped.items()}

    def _broadcast(self, trajectories: list[Trajectory] | None) -> list[Trajectory]:
        return broadcast_trajectories(trajectories, self._gloo_group)

    def ledger_counts(self) -> dict[str, Any]:
        """Return the ledger's counts; nothing on ranks other than 0."""
        return self._rank0.ledger.counts() if self._rank0 is not None else {}

"""Rollouts as the training loop sees them: the same batch on every rank, whoever collected it."""

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

_LOOK_SECONDS = 1.0
"""How long rank 0 waits for a batch before all ranks look whether one was asked to stop."""
_CHECK_TOKENS = 16
"""Of a response that only compares log-probs: the trainer waits for it after every publication."""


class RolloutSource:
    """On every rank; rank 0 owns prompts, servers, collector and ledger, the others receive. A context manager.

    Entering starts a local server, if the config asks for one, without waiting for it.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        rank: int,
        gloo_group: dist.ProcessGroup,
        timer: PhaseTimer,
        preemption: Preemption | None = None,
    ) -> None:
        """`gloo_group`: the group in which ranks wait for rank 0, see `parallel.layout.init_distributed`."""
        self._config = config
        self._preemption = preemption or Preemption()
        self._gloo_group = gloo_group
        self._timer = timer
        self._stack = ExitStack()
        self.stopped_by = 0
        """Number of the signal by which a rank was asked to stop, once all ranks know it; 0: none."""
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
        """Wait for the servers; what the publisher needs of them, on rank 0. Collective. `say` tells how it goes."""
        fleet = self._rank0.connect(say) if self._rank0 is not None else None
        dist.barrier(group=self._gloo_group)
        return fleet

    def state(self) -> RolloutState | None:
        """All that a resumed run needs of the rollouts at this moment; None on ranks other than 0.

        Generation goes on meanwhile. What completes after this moment is in flight in the state: a run that is killed
        and resumed from it samples these responses again, see `RolloutState`.
        """
        return self._rank0.state() if self._rank0 is not None else None

    def restore(self, state: RolloutState | None) -> None:
        """Go on where rank 0 took `state`; None on the other ranks, and for a run that starts anew.

        To be called before the first `set_version`, with the version of the state. Raises ConfigError where the
        state does not fit the configuration.
        """
        if self._rank0 is not None and state is not None:
            self._rank0.restore(state)

    def set_version(self, version: int) -> None:
        """Servers sample with this version from now on, and the next batch is trained at it. The first call, after
        the first publication, starts the collection. Raises VersionError where it starts at any other version than
        the restored one, or 0."""
        if self._rank0 is not None:
            self._rank0.set_version(version)

    def next_batch(self) -> list[Trajectory]:
        """The next batch in issue order, on every rank, with every token's age checked. Collective.

        Empty when a rank has been asked to stop: then nothing was taken, and `stopped_by` tells the signal.
        """
        with self._timer.phase("wait"):
            self._wait_for_batch()
            if self.stopped_by:
                return []
            batch = self._broadcast(self._rank0.take_batch() if self._rank0 is not None else None)
        return batch

    def _wait_for_batch(self) -> None:
        """Until the batch is complete, or a rank has been asked to stop: one look at both, the same for all ranks."""
        is_complete = False
        while not is_complete and not self.stopped_by:
            waits = self._rank0 is not None and not self._rank0.is_batch_complete(_LOOK_SECONDS)
            seen = torch.tensor([waits, self._preemption.look()])
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self._gloo_group)
            is_complete, self.stopped_by = not seen[0], int(seen[1])

    def sample_fresh(self) -> list[Trajectory]:
        """Responses to `publish.verify_prompts` held-out prompts by the present version, on every rank. Collective."""
        num_prompts = self._config.publish.verify_prompts
        if num_prompts == 0:
            return []
        with self._timer.phase("verify"):
            num_tokens = min(_CHECK_TOKENS, self._config.rollout.max_new_tokens)
            return self._broadcast(self._rank0.sample_fresh(num_prompts, num_tokens) if self._rank0 else None)

    def evaluate(self, step: int) -> dict[str, float]:
        """Sample the prompts of all evaluation datasets by the present version; `eval_accuracy` is the mean reward on
        the first one. Nothing on ranks other than 0. Responses go to `run_dir/evaluations/step_...`."""
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
        """Groups that were dropped so far, by reason; nothing on ranks other than 0."""
        dropped = self._rank0.ledger.dropped if self._rank0 is not None else {}
        return {f"dropped/{reason}": number for reason, number in dropped.items()}

    def _broadcast(self, trajectories: list[Trajectory] | None) -> list[Trajectory]:
        return broadcast_trajectories(trajectories, self._gloo_group)

    def ledger_counts(self) -> dict[str, Any]:
        return self._rank0.ledger.counts() if self._rank0 is not None else {}

"""Bound staleness: groups are issued within a budget, and batches are consumed in issue order."""

from collections import deque

from megatron_a3po.errors import ConfigError, VersionError
from megatron_a3po.rollout.ledger import Ledger
from megatron_a3po.rollout.state import RolloutState
from megatron_a3po.types import Trajectory, TrajectoryGroup


class StalenessBuffer:
    """Decide when a group may be issued, and hand out batches in issue order.

    With P groups per batch, batch k (trained at version k) has exactly the groups k*P ... k*P + P-1. Group j may be
    issued once the version is at least j // P - max_staleness. So no token of batch k is older than max_staleness
    versions. The budget alone would not suffice: if batches were consumed in the order of completion, an overtaken
    group would age while others are consumed.

    A dropped group is not counted, so all later groups move up by one place. They move to an earlier batch or stay in
    theirs, never to a later one, so the bound holds.
    """

    def __init__(self, *, groups_per_batch: int, max_staleness: int, num_batches: int, ledger: Ledger) -> None:
        self._groups_per_batch = groups_per_batch
        self._max_staleness = max_staleness
        self._num_groups = groups_per_batch * num_batches
        self._ledger = ledger
        self._ready: dict[int, TrajectoryGroup] = {}
        self._issue_again: deque[int] = deque()
        self._next_batch = 0
        self._version = 0

    @property
    def version(self) -> int:
        """The weight version that servers sample with and that the next batch is trained at"""
        return self._version

    def state(self) -> RolloutState:
        """Return what `restore` needs. No other thread may change the buffer or its ledger during the call."""
        return RolloutState(
            version=self._version,
            next_batch=self._next_batch,
            issued=self._ledger.issued,
            consumed=self._ledger.consumed,
            dropped=self._ledger.dropped,
            buffered=tuple(self._ready[group_id] for group_id in sorted(self._ready)),
            in_flight=self._ledger.in_flight,
        )

    def restore(self, state: RolloutState) -> None:
        """Continue from `state`, including its ledger. `num_batches` may have changed since.

        Raises ConfigError if the state does not fit this batch size or staleness, and ValueError if groups were issued.
        """
        self._check_fits(state)
        self._ledger.restore(state)
        self._version, self._next_batch = state.version, state.next_batch
        self._ready = {group.group_id: group for group in state.buffered}
        self._issue_again.extend(state.in_flight)

    def set_version(self, version: int) -> None:
        """Set the weight version. Raises VersionError if it goes back."""
        if version < self._version:
            raise VersionError(f"weight version went back from {self._version} to {version}")
        self._version = version

    def admit(self) -> int | None:
        """Issue the next group and return its number, or None while the budget of the present version is spent.

        After a restart, the groups that were in flight come first. They are older, and were within the budget then.
        """
        if self._issue_again:
            return self._issue_again.popleft()
        position = self._ledger.issued - sum(self._ledger.dropped.values())
        within_budget = position // self._groups_per_batch <= self._version + self._max_staleness
        return self._ledger.issue() if within_budget and position < self._num_groups else None

    def add(self, group: TrajectoryGroup) -> None:
        """Add a group that was in flight and is complete."""
        self._ledger.buffer(group.group_id)
        self._ready[group.group_id] = group

    def drop(self, group_id: int, reason: str) -> None:
        """Give up a group in flight; the next one takes its place."""
        self._ledger.drop(group_id, reason)

    def missing(self) -> int:
        """Return how many groups of the next batch are not complete yet."""
        return self._groups_per_batch - sum(group_id in self._ready for group_id in self._next_group_ids())

    def take(self) -> list[Trajectory]:
        """Return the next batch, which is complete. Raises VersionError if a token is over the staleness cap."""
        if missing := self.missing():
            raise ValueError(f"batch {self._next_batch} cannot be taken: {missing} of its groups are not complete")
        batch: list[Trajectory] = []
        for group_id in self._next_group_ids():
            group = self._ready.pop(group_id)
            self._ledger.consume(group_id)
            batch += group.trajectories
        for trajectory in batch:
            check_versions(trajectory, self._version, self._max_staleness)
        self._next_batch += 1
        return batch

    def _next_group_ids(self) -> list[int]:
        """Return the first groups that are neither consumed nor dropped; fewer than a batch if not all are issued."""
        return sorted([*self._ready, *self._ledger.in_flight])[: self._groups_per_batch]

    def _check_fits(self, state: RolloutState) -> None:
        size = self._groups_per_batch
        still_open = sorted([*(group.group_id for group in state.buffered), *state.in_flight])
        # Batches are taken in issue order, so every consumed group is older than every open one.
        first_open = still_open[0] if still_open else state.issued
        if state.consumed != state.next_batch * size or first_open < state.consumed:
            raise ConfigError(
                f"rollout.prompts_per_step = {size}: the checkpoint was written after {state.next_batch} batches "
                f"and {state.consumed} groups, which are not batches of this size in the order of issue; resume with "
                "the value that the checkpoint was written with"
            )
        sampled_by = {group.group_id: _oldest_version(group, default=state.version) for group in state.buffered}
        # Groups in flight are sampled anew, by the restored version or a later one.
        sampled_by |= dict.fromkeys(state.in_flight, state.version)
        for index, group_id in enumerate(still_open):
            version, batch = sampled_by[group_id], state.next_batch + index // size
            if batch - version > self._max_staleness:
                raise ConfigError(
                    f"max_staleness = {self._max_staleness}: the checkpoint has a group sampled by version {version} "
                    f"that is trained on at version {batch}; resume with the value that the checkpoint was written "
                    "with, or a larger one"
                )


def _oldest_version(group: TrajectoryGroup, *, default: int) -> int:
    spans = (trajectory.weight_versions for trajectory in group.trajectories if trajectory.response_length)
    return min((int(span.min()) for span in spans), default=default)


def check_versions(trajectory: Trajectory, version: int, max_staleness: int) -> None:
    """Check that a version in [version - max_staleness, version] sampled each token. Raises VersionError."""
    if trajectory.response_length == 0:
        raise VersionError(f"trajectory {trajectory.prompt_id}: empty response")
    oldest, newest = int(trajectory.weight_versions.min()), int(trajectory.weight_versions.max())
    name = f"trajectory {trajectory.prompt_id} (group {trajectory.group_id})"
    if oldest < 0:
        raise VersionError(f"{name}: a token without a weight version; is another client publishing to this server?")
    if newest > version:
        raise VersionError(f"{name}: a token of version {newest}, but the trainer is at {version}")
    if version - oldest > max_staleness:
        raise VersionError(f"{name}: a token of version {oldest} at version {version}, over {max_staleness=}")

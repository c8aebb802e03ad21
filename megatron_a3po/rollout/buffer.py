"""The one gate that bounds staleness: budgeted admission, and batches consumed in issue order."""

from collections import deque

from megatron_a3po.errors import ConfigError, VersionError
from megatron_a3po.rollout.ledger import Ledger
from megatron_a3po.rollout.state import RolloutState
from megatron_a3po.types import Trajectory, TrajectoryGroup


class StalenessBuffer:
    """Decides when a group may be issued and hands batches out in the order of issue.

    Batch k (trained at version k) consists of exactly the groups k*P ... k*P + P-1, and group j may be issued once the
    version is at least j // P - max_staleness. So no token of batch k is older than max_staleness versions. Admission
    alone would not do: with batches in order of completion an overtaken group ages while others are consumed.

    A group that is dropped is left out of the count, and all later ones move up by one. That takes them into an earlier
    batch or none, never into a later one, so the bound holds.
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
        """The weight version that servers sample with, and that the next batch is trained at."""
        return self._version

    def state(self) -> RolloutState:
        """What `restore` needs; call it where no other thread changes the buffer or its ledger."""
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
        """Go on where `state` was taken, with its ledger; `num_batches` may be another one by now.

        Raises ConfigError for a state that does not fit this batch size or staleness, and ValueError after an issue.
        """
        self._check_fits(state)
        self._ledger.restore(state)
        self._version, self._next_batch = state.version, state.next_batch
        self._ready = {group.group_id: group for group in state.buffered}
        self._issue_again.extend(state.in_flight)

    def set_version(self, version: int) -> None:
        if version < self._version:
            raise VersionError(f"weight version went back from {self._version} to {version}")
        self._version = version

    def admit(self) -> int | None:
        """The number of the next group, or None while the budget of the present version is spent.

        After a restart, first the groups that were in flight: they were within the budget of their time and are older.
        """
        if self._issue_again:
            return self._issue_again.popleft()
        position = self._ledger.issued - sum(self._ledger.dropped.values())
        within_budget = position // self._groups_per_batch <= self._version + self._max_staleness
        return self._ledger.issue() if within_budget and position < self._num_groups else None

    def add(self, group: TrajectoryGroup) -> None:
        self._ledger.buffer(group.group_id)
        self._ready[group.group_id] = group

    def drop(self, group_id: int, reason: str) -> None:
        """The group in flight is given up, and the next one takes its place."""
        self._ledger.drop(group_id, reason)

    def missing(self) -> int:
        """How many groups of the next batch are not complete yet."""
        return self._groups_per_batch - sum(group_id in self._ready for group_id in self._next_group_ids())

    def take(self) -> list[Trajectory]:
        """The next batch, complete, with the age of every token checked. Raises VersionError."""
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
        """The first groups that are neither consumed nor dropped; fewer than a batch has while not all are issued."""
        return sorted([*self._ready, *self._ledger.in_flight])[: self._groups_per_batch]

    def _check_fits(self, state: RolloutState) -> None:
        size = self._groups_per_batch
        still_open = sorted([*(group.group_id for group in state.buffered), *state.in_flight])
        # Batches were taken in the order of issue, so whatever was consumed is older than what is still open.
        first_open = still_open[0] if still_open else state.issued
        if state.consumed != state.next_batch * size or first_open < state.consumed:
            raise ConfigError(
                f"rollout.prompts_per_step = {size}: the checkpoint was written after {state.next_batch} batches "
                f"and {state.consumed} groups, which are not batches of this size in the order of issue; resume with "
                "the value that the checkpoint was written with"
            )
        sampled_by = {group.group_id: _oldest_version(group, default=state.version) for group in state.buffered}
        # From scratch, so by no older one.
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
    """Raises VersionError unless a version in [version - max_staleness, version] sampled each response token."""
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

"""The one gate that bounds staleness: budgeted admission, and batches consumed in issue order."""

from megatron_a3po.data.ledger import Ledger
from megatron_a3po.errors import VersionError
from megatron_a3po.types import Trajectory, TrajectoryGroup


class StalenessBuffer:
    """Decides when a group may be issued and hands batches out in the order of issue.

    Batch k (trained at version k) consists of exactly the groups k*P ... k*P + P-1, and group j may be issued once the
    version is at least j // P - max_staleness. So no token of batch k is older than max_staleness versions. Admission
    alone would not do: with batches in order of completion an overtaken group ages while others are consumed.
    """

    def __init__(self, *, groups_per_batch: int, max_staleness: int, num_batches: int, ledger: Ledger) -> None:
        self._groups_per_batch = groups_per_batch
        self._max_staleness = max_staleness
        self._num_groups = groups_per_batch * num_batches
        self._ledger = ledger
        self._ready: dict[int, TrajectoryGroup] = {}
        self._next_batch = 0
        self._version = 0

    @property
    def version(self) -> int:
        """The weight version that servers sample with, and that the next batch is trained at."""
        return self._version

    def set_version(self, version: int) -> None:
        if version < self._version:
            raise VersionError(f"weight version went back from {self._version} to {version}")
        self._version = version

    def admit(self) -> int | None:
        """The number of the next group, or None while the budget of the present version is spent."""
        group_id = self._ledger.issued
        within_budget = group_id // self._groups_per_batch <= self._version + self._max_staleness
        return self._ledger.issue() if within_budget and group_id < self._num_groups else None

    def add(self, group: TrajectoryGroup) -> None:
        self._ledger.buffer(group.group_id)
        self._ready[group.group_id] = group

    def missing(self) -> int:
        """How many groups of the next batch are not complete yet."""
        return sum(group_id not in self._ready for group_id in self._next_group_ids())

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

    def _next_group_ids(self) -> range:
        first = self._next_batch * self._groups_per_batch
        return range(first, first + self._groups_per_batch)


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

"""How many groups may go without rewards."""

from collections import Counter, deque

from megatron_a3po.errors import RewardError
from megatron_a3po.rewards.types import RewardFailure
from megatron_a3po.runtime.logging import logger

WINDOW = 100


class FailureWatch:
    """Counts failures among the last groups. Groups that nobody has seen yet count as successes, so that the first
    failure of a run is none too many."""

    def __init__(self, max_failed_share: float) -> None:
        self._max_failed_share = max_failed_share
        self._recent: deque[RewardFailure | None] = deque(maxlen=WINDOW)

    def record(self, failure: RewardFailure | None) -> None:
        """A group has its rewards (None) or goes without. Raises RewardError when too many do."""
        self._recent.append(failure)
        if failure is None:
            return
        logger.warning("a group is dropped (%s): %s", failure.kind, failure.message)
        failed = [seen for seen in self._recent if seen is not None]
        if len(failed) > self._max_failed_share * WINDOW:
            raise RewardError(too_many(failed, f"the last {WINDOW} groups", self._max_failed_share))


def too_many(failed: list[RewardFailure], of_what: str, max_failed_share: float) -> str:
    """The message of a RewardError."""
    counts = ", ".join(f"{number} {kind}" for kind, number in Counter(failure.kind for failure in failed).most_common())
    return (
        f"{len(failed)} of {of_what} got no reward ({counts}), over reward.max_failed_share = {max_failed_share:g}; "
        f"the last one: {failed[-1].message}; repair the reward function, or raise reward.max_failed_share"
    )

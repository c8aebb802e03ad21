"""Account for every group exactly once: issued = consumed + dropped + buffered + in flight, always."""

from collections import Counter
from enum import StrEnum

from megatron_a3po.rollout.state import RolloutState


class _State(StrEnum):
    IN_FLIGHT = "in_flight"
    BUFFERED = "buffered"
    CONSUMED = "consumed"


class Ledger:
    """The state of every group from its issue to its end. A step that skips or repeats a state raises ValueError."""

    def __init__(self) -> None:
        self._open: dict[int, _State] = {}
        self._issued = 0
        self._consumed = 0
        self._dropped: Counter[str] = Counter()

    @property
    def issued(self) -> int:
        """The number of groups issued so far, which is also the number of the next group"""
        return self._issued

    @property
    def consumed(self) -> int:
        """The number of groups trained on so far"""
        return self._consumed

    @property
    def dropped(self) -> dict[str, int]:
        """The number of dropped groups by reason"""
        return dict(self._dropped)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The groups issued and not complete, in issue order"""
        return tuple(sorted(group_id for group_id, state in self._open.items() if state is _State.IN_FLIGHT))

    def restore(self, state: RolloutState) -> None:
        """Continue the accounts of an earlier run, whose groups in flight count as issued already.

        Raises ValueError if this ledger has issued groups.
        """
        if self._issued:
            raise ValueError(f"the ledger cannot be restored: {self._issued} groups were issued already")
        self._issued, self._consumed = state.issued, state.consumed
        self._dropped = Counter(state.dropped)
        self._open = dict.fromkeys(state.in_flight, _State.IN_FLIGHT)
        self._open |= dict.fromkeys((group.group_id for group in state.buffered), _State.BUFFERED)

    def issue(self) -> int:
        """Issue the next group and return its number."""
        group_id = self._issued
        self._open[group_id] = _State.IN_FLIGHT
        self._issued += 1
        return group_id

    def buffer(self, group_id: int) -> None:
        """Record that the group's responses and rewards are complete."""
        self._require(group_id, _State.IN_FLIGHT, _State.BUFFERED)
        self._open[group_id] = _State.BUFFERED

    def consume(self, group_id: int) -> None:
        """Record that the group is part of a training batch."""
        self._require(group_id, _State.BUFFERED, _State.CONSUMED)
        del self._open[group_id]
        self._consumed += 1

    def drop(self, group_id: int, reason: str) -> None:
        """Record that the group will not be trained on."""
        if group_id not in self._open:
            raise ValueError(f"group {group_id} cannot be dropped ({reason}): it is not in flight or buffered")
        del self._open[group_id]
        self._dropped[reason] += 1

    def drop_open(self, reason: str) -> None:
        """Drop every open group, at the end of a run."""
        for group_id in list(self._open):
            self.drop(group_id, reason)

    def counts(self) -> dict[str, int | dict[str, int]]:
        """Return the number of groups in each state, and of dropped ones by reason."""
        states = Counter(self._open.values())
        return {
            "issued": self._issued,
            "consumed": self._consumed,
            "dropped": self._dropped.total(),
            "in_flight": states[_State.IN_FLIGHT],
            "buffered": states[_State.BUFFERED],
            "dropped_by_reason": self.dropped,
        }

    def _require(self, group_id: int, expected: _State, following: _State) -> None:
        state = self._open.get(group_id)
        if state is not expected:
            raise ValueError(f"group {group_id} cannot be {following.value}: it is {state or 'unknown or finished'}")

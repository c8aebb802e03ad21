"""No group is lost or used twice, and no token is trained on that is too old."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_a3po.errors import VersionError
from megatron_a3po.rollout.buffer import StalenessBuffer, check_versions
from megatron_a3po.rollout.ledger import Ledger
from megatron_a3po.types import TrajectoryGroup
from tests.support.trajectories import make_trajectory

seeded = settings(max_examples=60, deadline=None, derandomize=True)


def new_buffer(groups: int = 3, staleness: int = 2, batches: int = 5) -> tuple[StalenessBuffer, Ledger]:
    ledger = Ledger()
    return StalenessBuffer(groups_per_batch=groups, max_staleness=staleness, num_batches=batches, ledger=ledger), ledger


def group(group_id: int, versions: Sequence[int]) -> TrajectoryGroup:
    return TrajectoryGroup(group_id=group_id, trajectories=(make_trajectory(versions, group_id),) * 2)


def admit_all(buffer: StalenessBuffer) -> list[int]:
    admitted = []
    while (group_id := buffer.admit()) is not None:
        admitted.append(group_id)
    return admitted


def assert_balanced(ledger: Ledger) -> None:
    counts: dict[str, Any] = ledger.counts()
    assert counts["dropped"] == sum(counts["dropped_by_reason"].values())
    assert counts["issued"] == counts["consumed"] + counts["dropped"] + counts["buffered"] + counts["in_flight"]


@seeded
@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 5), st.integers(1, 30), st.integers(0, 2**32))
def test_in_whatever_order_groups_complete_no_token_is_over_the_cap_and_batches_come_in_order(
    groups: int, staleness: int, batches: int, slots: int, seed: int
) -> None:
    """Responses grow over publications, and lose all their tokens when the server retracts them; for some groups there
    is no reward."""
    buffer, ledger = new_buffer(groups, staleness, batches)
    random = Random(seed)
    in_flight: dict[int, list[int]] = {}
    consumed: list[int] = []
    dropped: set[int] = set()
    oldest = 0
    for _ in range(100_000):
        if len(in_flight) < slots and (group_id := buffer.admit()) is not None:
            in_flight[group_id] = []
        elif in_flight and random.random() < 0.8:
            group_id = random.choice(list(in_flight))
            in_flight[group_id].append(buffer.version)
            if random.random() < 0.2:
                in_flight[group_id] = [buffer.version]
            elif random.random() < 0.1:
                buffer.drop(group_id, "reward_error")
                dropped.add(group_id)
                del in_flight[group_id]
            elif random.random() < 0.3:
                buffer.add(group(group_id, in_flight.pop(group_id)))
        elif buffer.missing() == 0:
            batch = buffer.take()
            oldest = max(oldest, *(buffer.version - int(item.weight_versions.min()) for item in batch))
            consumed += [item.group_id for item in batch[::2]]
            buffer.set_version(buffer.version + 1)
        assert_balanced(ledger)
        if len(consumed) == groups * batches:
            break

    assert consumed == [id for id in range(ledger.issued) if id not in dropped]
    assert oldest <= staleness
    assert ledger.issued == groups * batches + len(dropped) and admit_all(buffer) == []


def test_a_batch_needs_exactly_its_own_groups_however_many_later_ones_wait() -> None:
    buffer, ledger = new_buffer(groups=2, staleness=2)
    for group_id in admit_all(buffer)[::-1]:
        if group_id != 1:
            buffer.add(group(group_id, [0]))

    assert buffer.missing() == 1
    refuse(buffer.take, ledger)
    buffer.add(group(1, [0]))
    assert buffer.missing() == 0
    assert [item.group_id for item in buffer.take()] == [0, 0, 1, 1]


def test_the_age_is_checked_when_a_batch_is_taken() -> None:
    buffer, _ = new_buffer(groups=1, staleness=1)
    for group_id in admit_all(buffer):
        buffer.add(group(group_id, [0]))
    buffer.set_version(2)  # a trainer that skipped a batch

    with pytest.raises(VersionError, match=r"version 0 .*version 2.*max_staleness=1"):
        buffer.take()


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ([7, -1, 7], "without a weight version"),
        ([7, 8], "version 8.* 7"),
        ([4, 7], "version 4.*version 7.*max_staleness=2"),
        ([], "empty"),
    ],
)
def test_unknown_future_too_old_and_missing_versions_are_errors_that_name_the_trajectory(
    versions: list[int], message: str
) -> None:
    check_versions(make_trajectory([5, 6, 7], group_id=9), version=7, max_staleness=2)  # at both ends of the window
    with pytest.raises(VersionError, match=message) as error:
        check_versions(make_trajectory(versions, group_id=9), version=7, max_staleness=2)
    assert "task/0/9" in str(error.value)


def refuse(operation: Callable[[], object], ledger: Ledger) -> None:
    before = ledger.counts()
    with pytest.raises(ValueError, match="cannot be"):
        operation()
    assert ledger.counts() == before, "a refused operation must leave the books as they are"


@seeded
@given(st.lists(st.tuples(st.sampled_from(["issue", "buffer", "consume", "drop"]), st.integers(0, 8)), max_size=60))
def test_the_books_balance_after_every_operation_also_a_refused_one(operations: list[tuple[str, int]]) -> None:
    ledger = Ledger()
    states: dict[int, str] = {}
    needs = {"buffer": ["in_flight"], "consume": ["buffered"], "drop": ["in_flight", "buffered"]}
    leads = {"buffer": "buffered", "consume": "consumed", "drop": "dropped"}
    for name, group_id in operations:
        if name == "issue":
            states[ledger.issue()] = "in_flight"
        else:
            arguments = (group_id, "why") if name == "drop" else (group_id,)
            if states.get(group_id) in needs[name]:
                getattr(ledger, name)(*arguments)
                states[group_id] = leads[name]
            else:
                refuse(lambda: getattr(ledger, name)(*arguments), ledger)  # noqa: B023
        assert_balanced(ledger)
        counts = ledger.counts()
        for state in ("in_flight", "buffered", "consumed", "dropped"):
            assert counts[state] == list(states.values()).count(state)


def test_closing_the_books_drops_what_is_open_with_the_reason_and_nothing_else() -> None:
    ledger = Ledger()
    for _ in range(4):
        ledger.issue()
    ledger.buffer(0)
    ledger.consume(0)
    ledger.buffer(1)
    ledger.drop(3, "aborted")
    ledger.drop_open("run_ended")

    assert ledger.counts()["dropped_by_reason"] == {"aborted": 1, "run_ended": 2}
    assert_balanced(ledger)

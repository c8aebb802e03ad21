"""A run that is killed and resumed skips no group, uses none twice, and trains on what it would have trained on."""

import asyncio
import dataclasses
import errno
import json
import math
import re
import resource
import signal
import struct
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_a3po.errors import ConfigError, DataError, VersionError
from megatron_a3po.rollout.buffer import StalenessBuffer
from megatron_a3po.rollout.collector import RolloutCollector
from megatron_a3po.rollout.ledger import Ledger
from megatron_a3po.rollout.state import RolloutState, load_rollout_state, save_rollout_state
from megatron_a3po.types import TrajectoryGroup
from tests.support.trajectories import make_trajectory

seeded = settings(max_examples=40, deadline=None, derandomize=True)
floats = st.floats(width=32) | st.sampled_from([math.nan, -math.inf, -0.0])


def group(group_id: int, versions: Sequence[int]) -> TrajectoryGroup:
    """Of a size that depends on the group."""
    tokens = torch.arange(2 + len(versions)) + group_id
    made = make_trajectory(versions, group_id, token_ids=tokens, reward_reason=f"reason_{len(versions)}")
    return TrajectoryGroup(group_id=group_id, trajectories=(made,) * (1 + group_id % 3))


def new_buffer(groups: int, staleness: int, batches: int, state: RolloutState | None = None) -> StalenessBuffer:
    buffer = StalenessBuffer(groups_per_batch=groups, max_staleness=staleness, num_batches=batches, ledger=Ledger())
    if state is not None:
        buffer.restore(state)
    return buffer


def state_after(batches: int, groups: int = 2) -> RolloutState:
    """Of a run that has consumed so many batches and has nothing open."""
    closed = batches * groups
    return RolloutState(
        version=batches, next_batch=batches, issued=closed, consumed=closed, dropped={}, buffered=(), in_flight=()
    )


def through_a_file(state: RolloutState) -> RolloutState:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.safetensors"
        save_rollout_state(state, path)
        loaded = load_rollout_state(path)
        path.write_bytes(b"")  # the state outlives its file
        return loaded


def plain(value: Any) -> Any:
    """Something that == compares bit for bit, NaN and the sign of zero included."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, float):
        return math.isnan(value) or struct.pack("d", value)
    return tuple(plain(item) for item in value) if isinstance(value, list | tuple) else value


@seeded
@given(st.lists(st.lists(st.tuples(st.lists(floats, max_size=4), st.floats()), max_size=3), max_size=4), st.data())
def test_a_state_comes_back_from_its_file_bit_for_bit(
    contents: list[list[tuple[list[float], float]]], data: st.DataObject
) -> None:
    """Also groups without trajectories, trajectories without response tokens, and a state without groups."""
    buffered = tuple(
        TrajectoryGroup(
            group_id=30 + 7 * number,
            trajectories=tuple(
                make_trajectory(
                    range(len(logprobs)),
                    30 + 7 * number,
                    behaviour_logprobs=torch.tensor(logprobs),
                    reward=reward,
                    prompt_id=data.draw(st.text(max_size=9)),
                    reward_reason=data.draw(st.sampled_from(["", "right_bad_format"])),
                )
                for logprobs, reward in members
            ),
        )
        for number, members in enumerate(contents)
    )
    in_flight = tuple(data.draw(st.lists(st.integers(60, 70), unique=True)))
    dropped = data.draw(st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=2))
    closed = 71 - len(buffered) - len(in_flight)
    counts = {"issued": 71 + sum(dropped.values()), "consumed": closed, "dropped": dropped}
    state = RolloutState(version=2**40, next_batch=3, **counts, buffered=buffered, in_flight=in_flight)
    assert plain(through_a_file(state)) == plain(state)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", 2),
        ("issued", 5),
        ("in_flight", [0]),
        ("in_flight", [-1]),
        ("in_flight", [4]),
        ("consumed", None),
        ("seed", 1),
        ("buffered", [[0, 1], [1, 1]]),
        ("buffered", [[0, 1], [1, 3]]),
        ("trajectories", []),
        ("trajectories", [["task/0/0", 0, 5, 7, 0.0, "stop"]]),
        ("token_ids", torch.arange(3)),
        ("weight_versions", torch.arange(4)),
        ("weight_versions", torch.zeros(9)),
        ("behaviour_logprobs", torch.zeros(9, 1)),
        ("something_else", torch.zeros(1)),
        ("token_ids", ...),
    ],
)
def test_a_file_of_another_content_is_refused_with_its_path(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "rollouts.safetensors"
    buffered = group(0, [0, 0, 0]), group(1, [0, 0, 0])
    state = dataclasses.replace(state_after(0), issued=4, buffered=buffered, in_flight=(2, 3))
    save_rollout_state(state, path)
    with safe_open(path, framework="pt") as file:
        written = json.loads(file.metadata()["rollout_state"])
    tensors = load_file(path)
    save_file(tensors, path, metadata={"rollout_state": json.dumps(written)})
    assert plain(load_rollout_state(path)) == plain(state), "only the damage is refused"

    if value is ...:
        del tensors[name]
    elif isinstance(value, torch.Tensor):
        tensors[name] = value
    else:
        written[name] = value
    save_file(tensors, path, metadata={"rollout_state": json.dumps(written)})

    with pytest.raises(DataError, match=re.escape(str(path))):
        load_rollout_state(path)


@pytest.mark.parametrize("damage", [0, 7, 100, -1, "another content", "missing", "a folder"])
def test_a_file_that_is_torn_foreign_or_none_is_refused_with_its_path(tmp_path: Path, damage: int | str) -> None:
    path = tmp_path / "rollouts.safetensors"
    if isinstance(damage, int):
        save_rollout_state(dataclasses.replace(state_after(0), issued=1, buffered=(group(0, [0]),)), path)
        path.write_bytes(path.read_bytes()[:damage])
    elif damage == "another content":
        save_file({"lm_head.weight": torch.zeros(2)}, path)
    elif damage == "a folder":
        path.mkdir()
    with pytest.raises(DataError, match=re.escape(str(path))):
        load_rollout_state(path)


def test_a_state_in_which_a_group_is_missing_or_counted_twice_cannot_be_made() -> None:
    for changes in (
        {"issued": 5},
        {"consumed": 3},
        {"in_flight": (2, 2)},
        {"in_flight": (4,)},
        {"dropped": {"late": 1}},
    ):
        with pytest.raises(ValueError, match="groups"):
            dataclasses.replace(state_after(2), **changes)  # type: ignore[arg-type]


@seeded
@given(
    groups=st.integers(1, 3),
    staleness=st.integers(0, 3),
    start=st.sampled_from([0, 7, 1000]),
    batches=st.integers(1, 5),
    slots=st.integers(1, 14),
    seed=st.integers(0, 2**32),
)
def test_wherever_a_run_is_saved_and_killed_no_group_is_skipped_or_used_twice_or_too_old(
    groups: int, staleness: int, start: int, batches: int, slots: int, seed: int
) -> None:
    """Responses grow over publications, groups end in any order, and a run may be saved between any two events."""
    random, end, kills = Random(seed), start + batches, 4
    saved, consumed_then = through_a_file(state_after(start, groups)), 0
    buffer, in_flight, to_reissue = new_buffer(groups, staleness, end, saved), dict[int, list[int]](), list[int]()
    consumed: list[int] = []
    for _ in range(100_000):
        if len(consumed) == groups * batches and not kills:
            break
        event = random.random()
        if event < 0.05:
            saved, consumed_then = through_a_file(buffer.state()), len(consumed)
            assert saved.in_flight == tuple(sorted([*in_flight, *to_reissue]))
        elif event < 0.1 and kills:
            kills -= 1
            buffer, in_flight, to_reissue = new_buffer(groups, staleness, end, saved), {}, list(saved.in_flight)
            consumed = consumed[:consumed_then]
            assert plain(buffer.state()) == plain(saved)
            assert buffer.version == saved.version
        elif event < 0.5 and len(in_flight) < slots and (group_id := buffer.admit()) is not None:
            assert group_id == (to_reissue.pop(0) if to_reissue else buffer.state().issued - 1)
            in_flight[group_id] = []
        elif event < 0.9 and in_flight:
            group_id = random.choice(list(in_flight))
            in_flight[group_id].append(buffer.version)
            if random.random() < 0.5:
                buffer.add(group(group_id, in_flight.pop(group_id)))
        elif buffer.version < start + len(consumed) // groups:
            buffer.set_version(buffer.version + 1)
        elif buffer.missing() == 0:
            batch = buffer.take()
            assert min(int(item.weight_versions.min()) for item in batch) >= buffer.version - staleness
            consumed += dict.fromkeys(item.group_id for item in batch)

    assert consumed == list(range(start * groups, end * groups))
    assert buffer.admit() is None
    final = buffer.state()
    assert (final.issued, final.consumed, final.buffered, final.in_flight) == (end * groups, end * groups, (), ())


@pytest.mark.parametrize("version", [0, 7, 1000])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_budget_after_a_restart_is_the_budget_of_the_version(version: int, staleness: int) -> None:
    buffer = new_buffer(3, staleness, 5000, state_after(version, 3))
    issued = 0
    while buffer.admit() is not None:
        issued += 1
    assert issued == 3 * (staleness + 1)

    again = new_buffer(3, staleness, 5000, through_a_file(buffer.state()))
    in_flight = [again.admit() for _ in range(issued)]
    assert in_flight == list(range(3 * version, 3 * (version + staleness + 1)))
    assert again.admit() is None
    again.set_version(version + 1)
    assert [again.admit() for _ in range(4)] == [*range(in_flight[-1] + 1, in_flight[-1] + 4), None]


def test_a_restored_buffer_refuses_an_earlier_version_and_a_second_life() -> None:
    buffer = new_buffer(2, 1, 9, state_after(4))
    buffer.set_version(4)
    with pytest.raises(VersionError, match="from 4 to 3"):
        buffer.set_version(3)
    with pytest.raises(ValueError, match="8 groups were issued already"):
        buffer.restore(state_after(4))
    assert plain(buffer.state()) == plain(state_after(4))


OPEN: dict[str, Any] = {"issued": 12, "buffered": (group(8, [3]), group(9, [4])), "in_flight": (10, 11)}


@pytest.mark.parametrize(
    ("changes", "groups", "staleness", "message"),
    [
        ({}, 1, 1, r"rollout\.prompts_per_step = 1"),
        ({}, 3, 1, r"rollout\.prompts_per_step = 3"),
        ({}, 4, 1, r"rollout\.prompts_per_step = 4"),
        (OPEN, 1, 1, r"rollout\.prompts_per_step = 1"),
        (OPEN, 4, 1, r"rollout\.prompts_per_step = 4"),
        (OPEN, 2, 0, "max_staleness = 0: .* by version 3 .* at version 4"),
        (OPEN | {"buffered": (group(8, [4]), group(9, [4]))}, 2, 0, "max_staleness = 0: .* version 4 .* at version 5"),
        # A group that is older than what was consumed is in flight.
        ({"issued": 10, "dropped": {"late": 1}, "in_flight": (7,)}, 2, 1, r"rollout\.prompts_per_step = 2"),
        (OPEN | {"issued": 13, "dropped": {"late": 1}}, 2, 1, ""),
    ],
)
def test_a_state_that_does_not_fit_the_configuration_names_the_key_and_changes_nothing(
    changes: dict[str, Any], groups: int, staleness: int, message: str
) -> None:
    state, buffer = dataclasses.replace(state_after(4), **changes), new_buffer(groups, staleness, 9)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        buffer.restore(state)
    assert plain(buffer.state()) == plain(state_after(0) if message else state)


def test_the_place_of_a_dropped_group_is_taken_by_the_next_one_also_after_a_restart() -> None:
    state = dataclasses.replace(
        state_after(4), issued=11, dropped={"late": 1}, buffered=(group(8, [4]),), in_flight=(10,)
    )
    buffer = new_buffer(2, 1, 9, state)

    assert buffer.missing() == 1 and buffer.admit() == 10
    buffer.add(group(10, [4]))
    assert [trajectory.group_id for trajectory in buffer.take()] == [8, 8, 8, 10, 10]


class Run:
    """The collector with a sampler whose responses depend on the number of the group alone, but not their order."""

    def __init__(self, *, staleness: int, batches: int, seed: int, state: RolloutState | None = None) -> None:
        self.buffer = new_buffer(3, staleness, batches, state)
        self.asked: list[int] = []
        self._staleness, self._random = staleness, Random(seed)
        self._collector = RolloutCollector(
            *(self.buffer, self._sample, _as_it_is, asyncio.Event().wait),
            max_concurrent_groups=5,  # type: ignore[arg-type]
        )
        self._collector.set_version(self.buffer.version)
        self._collector.start()

    async def batches(self, count: int) -> list[Any]:
        """Train on so many, each with a publication behind it."""
        taken = []
        for _ in range(count):
            await asyncio.wait_for(self._collector.batch_complete(), 60.0)
            taken.append(plain(self._collector.take_batch()))
            self._collector.set_version(self.buffer.version + 1)
        return taken

    async def stop(self) -> None:
        await self._collector.stop()

    async def _sample(self, group_id: int) -> TrajectoryGroup:
        self.asked.append(group_id)
        for _ in range(self._random.randrange(12)):
            await asyncio.sleep(0)
        return group(group_id, [max(0, group_id // 3 - self._staleness)])


async def _as_it_is(group: TrajectoryGroup) -> TrajectoryGroup:
    return group


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize(("before", "after", "planned"), [(0, 4, 4), (1, 3, 4), (5, 4, 9), (3, 2, 3)])
async def test_an_interrupted_or_prolonged_run_trains_on_the_same_trajectories_in_the_same_order(
    tmp_path: Path, staleness: int, before: int, after: int, planned: int
) -> None:
    whole = Run(staleness=staleness, batches=before + after, seed=1)
    expected = await whole.batches(before + after)
    await whole.stop()
    for seed in range(2, 12):
        first = Run(staleness=staleness, batches=planned, seed=seed)
        batches = await first.batches(before)
        for _ in range(seed % 4):
            await asyncio.sleep(0)
        save_rollout_state(first.buffer.state(), tmp_path / "state")
        await first.batches(seed % 2 if planned > before else 0)  # lost: the kill comes after the checkpoint
        await first.stop()

        state = load_rollout_state(tmp_path / "state")
        second = Run(staleness=staleness, batches=before + after, seed=seed + 100, state=state)
        batches += await second.batches(after)
        await second.stop()

        assert batches == expected
        assert second.asked == [*state.in_flight, *range(state.issued, 3 * (before + after))]
        assert plain(second.buffer.state()) == plain(whole.buffer.state())


def test_a_full_disk_is_an_oserror_with_its_number(tmp_path: Path) -> None:
    state = dataclasses.replace(state_after(0), version=1, issued=1, buffered=(group(0, [0] * 50_000),))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            save_rollout_state(state, tmp_path / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert raised.value.errno == errno.EFBIG

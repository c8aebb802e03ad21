"""Rollouts of a run as the training loop sees them, saved while they go on, and resumed."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_a3po.config import DataConfig, RewardConfig, RolloutConfig, RunConfig
from megatron_a3po.errors import DataError, VersionError
from megatron_a3po.fleet.protocol import version_label
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.rollout.source import RolloutSource
from megatron_a3po.rollout.state import RolloutState, load_rollout_state, save_rollout_state
from megatron_a3po.runtime.signals import Preemption
from megatron_a3po.runtime.timing import PhaseTimer
from tests.support.scripted_server import ScriptedServer

PROMPTS, GROUP_SIZE, STALENESS, STEPS = 3, 2, 2, 5
AT_THREE = RolloutState(version=3, next_batch=3, issued=9, consumed=9, dropped={}, buffered=(), in_flight=())
LIMITS = {"max_new_tokens": 4, "max_concurrent_groups": 5}
Start = Callable[..., AbstractContextManager["Run"]]


class Run:
    """One life of a run on rank 0, as the training loop lives it, without a trainer."""

    def __init__(self, source: RolloutSource, fleet: Fleet, server: ScriptedServer) -> None:
        self.source, self.fleet, self.server = source, fleet, server
        self.version = 0

    def publish(self, version: int) -> None:
        self.version = version
        self.fleet.pool.membership.begin_update()
        self.server.version = version_label(version, self.fleet.pool.run)
        self.fleet.confirm(version)
        self.source.set_version(version)

    def step(self) -> list[str]:
        """Train on a batch; returns the prompts of its groups."""
        batch = self.source.next_batch()
        assert all(self.version - int(item.weight_versions.min()) <= STALENESS for item in batch)
        self.publish(self.version + 1)
        return [trajectory.prompt_id for trajectory in batch[::GROUP_SIZE]]

    def until_idle(self) -> None:
        while self.source.ledger_counts()["in_flight"]:
            time.sleep(0.005)

    def take_state(self) -> RolloutState:
        state = self.source.state()
        assert state is not None
        return state


@pytest.fixture
def start(model: Path, server: ScriptedServer, tmp_path: Path, gloo_group: dist.ProcessGroup) -> Start:
    @contextmanager
    def start(
        state: RolloutState | None = None, num_steps: int = STEPS, version: int | None = None, **stop: Preemption
    ) -> Iterator[Run]:
        config = RunConfig(
            model=model,
            run_dir=tmp_path / "run",
            num_steps=num_steps,
            max_staleness=STALENESS,
            data=DataConfig(task="spell_backward", size=40, num_held_out=8),
            reward=RewardConfig(scorer="tests.support.reward_functions:length"),  # starts faster than the task's
            rollout=RolloutConfig(servers=[server.url], prompts_per_step=PROMPTS, group_size=GROUP_SIZE, **LIMITS),
        )
        with RolloutSource(
            config, rank=0, gloo_group=gloo_group, timer=PhaseTimer(), look_seconds=0.05, **stop
        ) as source:
            fleet = source.connect(lambda message: None)
            assert fleet is not None
            source.restore(state)
            run = Run(source, fleet, server)
            restored = state.version if state is not None else 0
            run.publish(restored if version is None else version)
            yield run

    return start


def test_a_killed_run_goes_on_with_the_prompts_that_it_would_have_had(
    start: Start, server: ScriptedServer, tmp_path: Path
) -> None:
    server.generation_seconds = lambda number: 0.05 * (number % 3)
    with start() as run:
        expected = [run.step() for _ in range(STEPS)]
        assert run.source.ledger_counts()["consumed"] == STEPS * PROMPTS

    with start() as run:
        prompts = [run.step() for _ in range(2)]
        while not (state := run.take_state()).in_flight or not state.buffered:
            time.sleep(0.005)
        save_rollout_state(state, tmp_path / "rollouts.safetensors")
        run.step()  # lost: the kill comes after the checkpoint
    with start(load_rollout_state(tmp_path / "rollouts.safetensors"), num_steps=STEPS + 1) as run:
        prompts += [run.step() for _ in range(STEPS - 2)]
        assert prompts == expected
        run.step()
        counts = run.source.ledger_counts()
    total = (STEPS + 1) * PROMPTS
    assert (counts["issued"], counts["consumed"], counts["dropped"]) == (total, total, 0)


def test_every_snapshot_of_a_busy_run_accounts_for_every_group(start: Start, server: ScriptedServer) -> None:
    server.generation_seconds = lambda number: 0.002 * (number % 5)
    with start() as run:
        for step in range(STEPS):
            states = [run.take_state() for _ in range(20)]
            assert {(state.version, state.next_batch, state.consumed) for state in states} == {
                (step, step, step * PROMPTS)
            }
            run.step()
        assert run.take_state().version == STEPS


def test_a_run_that_is_asked_to_stop_while_it_waits_for_a_slow_server_loses_and_repeats_nothing(
    start: Start, server: ScriptedServer
) -> None:
    with start() as run:
        expected = [run.step() for _ in range(STEPS)]

    preemption = Preemption()
    with start(preemption=preemption) as run:
        run.step()
        run.until_idle()
        server.generation_seconds = lambda _: 60.0  # what is issued from now on, the last batch, does not come
        for _ in range(STALENESS + 1):
            run.step()
        threading.Timer(0.1, lambda: setattr(preemption, "requested_by", signal.SIGTERM)).start()
        assert run.source.next_batch() == [] and run.source.stopped_by == signal.SIGTERM
        assert run.source.next_batch() == [], "it stays so"
        state = run.take_state()
    assert state.next_batch == state.version == run.version == STEPS - 1 and len(state.in_flight) == PROMPTS

    server.generation_seconds = lambda _: 0.0
    with start(state) as run:
        assert run.step() == expected[-1] and run.source.ledger_counts()["consumed"] == STEPS * PROMPTS


def test_a_batch_that_is_complete_stays_in_the_state_when_the_run_is_asked_to_stop(start: Start) -> None:
    preemption = Preemption()
    with start(preemption=preemption) as run:
        run.step()
        run.until_idle()
        before = run.take_state()
        preemption.requested_by = signal.SIGUSR1
        assert run.source.next_batch() == []
        assert run.take_state() == before and len(before.buffered) >= PROMPTS


def test_the_trainer_and_the_rollouts_start_at_one_version(
    start: Start,
) -> None:
    """A resumed trainer with the rollouts of a new run would train on the first prompts again."""
    for state, trainer, rollouts in ((None, 3, 0), (AT_THREE, 0, 3), (AT_THREE, 4, 3)):
        with (
            pytest.raises(VersionError, match=f"weight version {trainer}, but the rollouts at {rollouts}"),
            start(state, version=trainer),
        ):
            pass


def test_a_run_does_not_go_on_with_other_prompts_than_those_of_its_checkpoint(start: Start, tmp_path: Path) -> None:
    with start(None) as run:
        save_rollout_state(run.take_state(), tmp_path / "state.safetensors")
    prompts = load_rollout_state(tmp_path / "state.safetensors").prompts
    assert prompts
    with start(replace(AT_THREE, prompts=prompts), version=3):
        pass
    with (
        pytest.raises(DataError, match=r"`data`.*`run_dir="),
        start(replace(AT_THREE, prompts=f"{prompts} and others"), version=3),
    ):
        pass


def test_other_ranks_have_no_state_and_take_none(model: Path, gloo_group: dist.ProcessGroup, tmp_path: Path) -> None:
    config = RunConfig(model=model, run_dir=tmp_path, num_steps=1, data=DataConfig(task="spell_backward"))
    with RolloutSource(config, rank=1, gloo_group=gloo_group, timer=PhaseTimer()) as source:
        source.restore(None)
        source.set_version(7)
        assert source.state() is None

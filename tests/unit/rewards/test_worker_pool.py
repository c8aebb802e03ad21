"""Reward functions in their own processes: what they return arrives, and misbehaviour costs no more than its group."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from megatron_a3po.config.server_key import KEY_VARIABLE
from megatron_a3po.errors import RewardError
from megatron_a3po.rewards.scorers import ScorerSpec
from megatron_a3po.rewards.types import FailureKind, RewardFailure, Sample, Score
from megatron_a3po.rewards.worker_pool import RewardWorkers, WorkerSettings
from tests.support.paths import ROOT

FUNCTIONS = "tests.support.reward_functions"
LONG_SECONDS = 60.0
"""A deadline that no test means to reach."""
Open = Callable[..., RewardWorkers]


def sample(response: str, **changes: Any) -> Sample:
    values: dict[str, Any] = {"prompt_id": "p/1", "prompt": "What?", "answer": "42", "row": {}, "num_tokens": 7}
    return Sample(response=response, **(values | {"truncated": False} | changes))


def group(*responses: str) -> list[Sample]:
    return [sample(response) for response in responses]


@pytest_asyncio.fixture
async def open_workers(tmp_path: Path) -> AsyncIterator[Open]:
    opened: list[RewardWorkers] = []

    def open_workers(function: str, *, format_pattern: str | None = None, **changes: Any) -> RewardWorkers:
        spec = ScorerSpec(scorer=f"{FUNCTIONS}:{function}", format_pattern=format_pattern)
        settings = {"max_workers": 1, "memory_bytes": 1 << 30, "log_file": tmp_path / "rewards.log"}
        settings |= {"timeout_seconds": LONG_SECONDS} | changes
        opened.append(RewardWorkers(WorkerSettings(spec=spec, **settings)))
        opened[-1].start()
        return opened[-1]

    yield open_workers
    await asyncio.gather(*(workers.close() for workers in opened))


async def values(workers: RewardWorkers, *responses: str) -> list[float]:
    (outcome,) = await workers.score([group(*responses)])
    assert not isinstance(outcome, RewardFailure), outcome
    return [score.value for score in outcome]


async def failure(workers: RewardWorkers, response: str) -> RewardFailure:
    (outcome,) = await workers.score([group(response)])
    assert isinstance(outcome, RewardFailure)
    return outcome


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # pytest's own deadline ends it
        await asyncio.sleep(0.01)


def processes() -> list[psutil.Process]:
    """The watchdogs of all workers."""
    return [child for child in psutil.Process().children() if "rewards.worker" in " ".join(child.cmdline())]


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def read_pids(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


async def test_a_sample_arrives_whole_and_its_score_comes_back_with_reason_and_format(open_workers: Open) -> None:
    """Also a row's tuples: with lists instead, reasoning-gym's arc_agi calls right answers wrong."""
    workers = open_workers("everything", format_pattern=r"<think>.*</think>")
    responses = "so <think>\nwell\n</think>\n3", "<think> 3"
    (outcome,) = await workers.score([[sample(text, row={"level": (5, 6)}, truncated=True) for text in responses]])

    assert outcome == [Score(value=1.0, reason="seen", has_format=has_format) for has_format in (True, False)]


async def test_a_function_sees_neither_a_gpu_nor_the_servers_key_and_ends_with_the_run(
    open_workers: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "5ec2e7")
    workers = open_workers("environment")
    assert await values(workers, "x") == [1.0]
    (watchdog,) = processes()
    assert "5ec2e7" not in watchdog.environ().values()

    await workers.close()

    assert "hello from a reward function" in (tmp_path / "rewards.log").read_text()
    assert processes() == []


async def test_a_function_that_fails_costs_its_group_and_no_other(open_workers: Open) -> None:
    expected = {
        "raise": (FailureKind.ERROR, "ZeroDivisionError: in the user's code"),
        "leave": (FailureKind.ERROR, "SystemExit: 0"),
        "return nan": (FailureKind.INVALID, "nan"),
        f"die {int(signal.SIGSEGV)}": (FailureKind.DIED, "SIGSEGV"),
        "eat": (FailureKind.MEMORY, "MemoryError"),
    }
    groups = [item for response in expected for item in (group("fine"), group("fine", response, "fine"))]
    outcomes = await open_workers("bad").score([*groups, group("fine")])

    assert outcomes[::2] == [[Score(value=1.0)]] * (len(expected) + 1)
    for outcome, (kind, message) in zip(outcomes[1::2], expected.values(), strict=True):
        assert isinstance(outcome, RewardFailure) and outcome.kind is kind and message in outcome.message


async def test_a_function_that_hangs_is_killed_at_the_deadline_while_the_event_loop_runs_on(open_workers: Open) -> None:
    workers = open_workers("bad", timeout_seconds=0.3)
    await workers.ready()
    scoring = asyncio.create_task(failure(workers, "hang"))
    turns = 0
    while not scoring.done():
        turns += 1
        await asyncio.sleep(0.01)

    assert turns > 3
    assert scoring.result().kind is FailureKind.TIMEOUT
    assert "reward.timeout_seconds = 0.3 s" in scoring.result().message
    outcome: Any = None
    while not isinstance(outcome, list):  # a busy machine may need more than the deadline for a good function, too
        (outcome,) = await workers.score([group("fine")])
    assert outcome == [Score(value=1.0)]


async def test_a_child_that_comes_back_into_the_worker_answers_nothing_and_children_can_be_terminated(
    open_workers: Open,
) -> None:
    workers = open_workers("bad")
    for _ in range(3):
        assert await values(workers, "fork", "fine") == [1.0, 1.0]
    assert await values(open_workers("terminate"), "x") == [1.0]


@pytest.mark.parametrize("end", ["the request is cancelled", "the scorer dies"])
async def test_whatever_a_function_has_started_is_killed_with_it(open_workers: Open, tmp_path: Path, end: str) -> None:
    workers = open_workers("bad")
    scoring = asyncio.create_task(failure(workers, f"daemons {tmp_path / 'pids'}"))
    await until(lambda: len(read_pids(tmp_path / "pids")) == 3)
    pids = read_pids(tmp_path / "pids")
    assert all(map(is_alive, pids))

    if end == "the scorer dies":
        (watchdog,) = processes()
        min(watchdog.children(), key=lambda child: child.create_time()).kill()
        assert (await scoring).kind is FailureKind.DIED
    else:
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
        await workers.close()

    await until(lambda: not any(map(is_alive, pids)))


async def test_signals_to_all_processes_of_a_step_end_no_worker(open_workers: Open) -> None:
    """As Slurm sends them before it ends a job, also while a worker starts."""
    workers = open_workers("process")
    first = asyncio.create_task(values(workers, "x"))
    while not first.done():
        signal_workers()
        await asyncio.sleep(0.01)
    signal_workers()

    assert await values(workers, "x") == first.result()


def signal_workers() -> None:
    for process in [each for watchdog in processes() for each in (watchdog, *watchdog.children())]:
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("victim", ["watchdog", "scorer"])
async def test_an_idle_worker_that_has_ended_costs_no_group(open_workers: Open, victim: str) -> None:
    workers = open_workers("process")
    (scorer,) = await values(workers, "x")
    (watchdog,) = processes()
    os.kill(watchdog.pid if victim == "watchdog" else int(scorer), signal.SIGKILL)
    (worker,) = workers._workers
    await until(lambda: worker.has_ended)

    assert await values(workers, "x") != [scorer]


async def test_more_workers_start_while_requests_wait_and_no_more_than_allowed(open_workers: Open) -> None:
    workers = open_workers("bad", max_workers=2, grow_seconds=0.01)
    hanging = [asyncio.create_task(failure(workers, "sleep")) for _ in range(3)]
    await until(lambda: len(workers._workers) == 2 and not workers._starts)
    await asyncio.sleep(0.1)  # ten times as long as the third request waits for another worker

    assert len(processes()) == 2 and not workers._starts
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


@pytest.mark.parametrize("scorer", ["tests.unit.no_such_module:f", f"{FUNCTIONS}:lenght"])
async def test_a_scorer_that_does_not_exist_is_an_error_before_anything_is_scored(scorer: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_workers": 1, "timeout_seconds": LONG_SECONDS, "memory_bytes": None}
    workers = RewardWorkers(WorkerSettings(spec=ScorerSpec(scorer=scorer), log_file=tmp_path / "log", **settings))
    workers.start()
    await workers.raise_if_failed()  # nobody knows yet

    mistake = rf"reward\.scorer = '{scorer}'.*(on PYTHONPATH|name a function .*length)"
    for check in (workers.ready, workers.raise_if_failed, lambda: values(workers, "x")):
        with pytest.raises(RewardError, match=mistake):
            await check()
    await workers.close()


async def test_workers_and_what_they_started_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Also where the worker is too busy to see that its pipe is closed."""
    pids = tmp_path / "pids"
    program = f"""
import asyncio, sys
from pathlib import Path
from {__name__} import FUNCTIONS, RewardWorkers, ScorerSpec, WorkerSettings, group

async def main():
    settings = {{"timeout_seconds": 600, "max_workers": 1, "memory_bytes": None, "log_file": Path(sys.argv[1])}}
    workers = RewardWorkers(WorkerSettings(spec=ScorerSpec(scorer=FUNCTIONS + ":bad"), **settings))
    workers.start()
    await workers.score([group("daemons " + sys.argv[2])])

asyncio.run(main())
"""
    arguments = [sys.executable, "-c", program, str(tmp_path / "log"), str(pids)]
    run = await asyncio.create_subprocess_exec(*arguments, env=os.environ | {"PYTHONPATH": str(ROOT)})
    await until(lambda: len(read_pids(pids)) == 3 or run.returncode is not None)
    of_run = psutil.Process(run.pid).children(recursive=True)
    assert len(of_run) >= 2 + 3

    run.kill()
    await run.wait()

    await until(lambda: not any(is_alive(process.pid) for process in of_run))

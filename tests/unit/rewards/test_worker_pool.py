"""Reward functions in their own processes: what they return arrives, and misbehaviour costs no more than its group."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from reasoning_gym.factory import create_dataset

from megatron_a3po.errors import RewardError
from megatron_a3po.rewards import worker_pool as pool_module
from megatron_a3po.rewards.scorers import ScorerSpec, TaskSpec
from megatron_a3po.rewards.types import FailureKind, RewardFailure, Sample
from megatron_a3po.rewards.worker_pool import PoolSettings, RewardPool
from tests.support.paths import ROOT

FUNCTIONS = "tests.support.reward_functions"
LONG_SECONDS = 60.0
"""A deadline that no test means to reach."""


def sample(response: str, **changes: Any) -> Sample:
    values: dict[str, Any] = {"prompt_id": "p/1", "prompt": "What?", "answer": "42", "row": {}, "num_tokens": 7}
    return Sample(response=response, **(values | {"truncated": False} | changes))


def group(*responses: str) -> list[Sample]:
    return [sample(response) for response in responses]


@pytest_asyncio.fixture
async def open_pool(tmp_path: Path) -> AsyncIterator[Callable[..., RewardPool]]:
    pools: list[RewardPool] = []

    def open_pool(scorer: str, *, timeout_seconds: float = LONG_SECONDS, **changes: Any) -> RewardPool:
        name = f"{FUNCTIONS}:{scorer}" if scorer.isidentifier() and scorer != "task" else scorer
        spec = ScorerSpec(scorer=name, **changes.pop("spec", {}))
        settings = {"max_workers": 1, "memory_bytes": 1 << 30, "log_file": tmp_path / "rewards.log"} | changes
        pools.append(RewardPool(PoolSettings(spec=spec, timeout_seconds=timeout_seconds, **settings)))
        pools[-1].start()
        return pools[-1]

    yield open_pool
    await asyncio.gather(*(pool.close() for pool in pools))


async def values(pool: RewardPool, *responses: str) -> list[float]:
    (outcome,) = await pool.score([group(*responses)])
    assert not isinstance(outcome, RewardFailure), outcome
    return [score.value for score in outcome]


async def failure(pool: RewardPool, response: str) -> RewardFailure:
    (outcome,) = await pool.score([group(response)])
    assert isinstance(outcome, RewardFailure)
    return outcome


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("length", [3.0, 1.0, 2.0]),
        ("slow_length", [3.0, 1.0, 2.0]),
        ("rank_in_group", [2.0, 0.0, 1.0]),
        ("slow_rank_in_group", [2.0, 0.0, 1.0]),
        ("with_reason", [0.0, 0.0, 1.0]),
    ],
)
async def test_a_function_may_be_async_or_not_and_take_one_response_or_all_of_a_group(
    open_pool: Callable[..., RewardPool], function: str, expected: list[float]
) -> None:
    assert await values(open_pool(function), "aaa", "a", "aa") == expected


async def test_the_reason_that_a_function_gives_comes_with_its_reward(open_pool: Callable[..., RewardPool]) -> None:
    (outcome,) = await open_pool("with_reason").score([group("a", "aa")])

    assert [score.reason for score in outcome] == ["odd", "even"]


async def test_a_function_sees_the_prompt_the_answer_the_row_and_how_the_response_ended(
    open_pool: Callable[..., RewardPool],
) -> None:
    (outcome,) = await open_pool("everything").score([[sample("x", row={"level": 5}, truncated=True)]])

    assert [score.value for score in outcome] == [1.0]


async def test_a_row_reaches_its_scorer_with_its_tuples(open_pool: Callable[..., RewardPool]) -> None:
    """Where they had become lists, arc_agi would call the right answer wrong."""
    entry = create_dataset("arc_agi", size=1, seed=1)[0]
    pool = open_pool("task", spec={"task": TaskSpec(name="arc_agi", options={})})
    (outcome,) = await pool.score([[sample(entry["answer"], row=entry)]])

    assert not isinstance(outcome, RewardFailure) and [score.value for score in outcome] == [1.0]


async def test_what_a_function_prints_goes_to_the_log_and_it_sees_no_gpu(
    open_pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    pool = open_pool("environment")
    assert await values(pool, "x") == [1.0]
    await pool.close()

    assert "hello from a reward function" in (tmp_path / "rewards.log").read_text()


async def test_the_format_is_matched_anywhere_in_the_response_over_lines(
    open_pool: Callable[..., RewardPool],
) -> None:
    pool = open_pool("length", spec={"format_pattern": r"<think>.*</think>"})
    (outcome,) = await pool.score([group("so <think>\nwell\n</think>\n3", "<think> 3")])

    assert [score.has_format for score in outcome] == [True, False]


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        ("raise", FailureKind.ERROR, "ZeroDivisionError: in the user's code"),
        ("leave", FailureKind.ERROR, "SystemExit: 0"),
        (f"die {int(signal.SIGSEGV)}", FailureKind.DIED, "was killed by SIGSEGV"),
        (f"die {int(signal.SIGKILL)}", FailureKind.DIED, "was killed by SIGKILL"),
        ("eat", FailureKind.MEMORY, "MemoryError"),
        ("return nan", FailureKind.INVALID, "nan is no reward; return a finite number"),
        ("return text", FailureKind.INVALID, "'1.0' is no reward"),
        ("return none", FailureKind.INVALID, "None is no reward"),
        ("return list", FailureKind.INVALID, "[1.0, 2.0] is no reward"),
        ("badreason", FailureKind.INVALID, "'Not A Reason' is no reason"),
    ],
)
async def test_a_function_that_fails_costs_its_group_and_no_other(
    open_pool: Callable[..., RewardPool], response: str, kind: FailureKind, message: str
) -> None:
    pool = open_pool("bad")
    first, failed, last = await pool.score([group("fine"), group("fine", response, "fine"), group("fine", "fine")])

    assert isinstance(failed, RewardFailure) and failed.kind is kind and message in failed.message
    assert [len(outcome) for outcome in (first, last)] == [1, 2]
    assert await values(pool, "fine") == [1.0]


@pytest.mark.parametrize("response", ["hang", "sleep"])
async def test_a_function_that_hangs_is_killed_at_the_deadline_and_replaced(
    open_pool: Callable[..., RewardPool], response: str
) -> None:
    pool = open_pool("bad", timeout_seconds=1.0)
    await pool.ready()

    failed = await failure(pool, response)

    assert failed.kind is FailureKind.TIMEOUT and "reward.timeout_seconds = 1 s" in failed.message
    pool._settings = replace(pool._settings, timeout_seconds=LONG_SECONDS)  # a busy machine may take more than 1 s
    assert await values(pool, "fine") == [1.0]


async def test_a_child_that_comes_back_into_the_worker_answers_nothing(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("bad")

    for _ in range(3):
        assert await values(pool, "fork", "fine") == [1.0, 1.0]


async def test_whatever_a_killed_function_has_started_is_killed_with_it(
    open_pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    pool = open_pool("bad", timeout_seconds=30.0)
    await pool.ready()
    scoring = asyncio.create_task(failure(pool, f"daemons {tmp_path / 'pids'}"))
    while len(pids := (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []) < 3:
        await asyncio.sleep(0.01)
    assert all(is_alive(int(pid)) for pid in pids)

    scoring.cancel()
    await asyncio.gather(scoring, return_exceptions=True)
    await pool.close()

    await all_gone(pids)


async def test_whatever_a_function_has_started_is_killed_when_its_worker_dies(
    open_pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    pool = open_pool("bad")
    scoring = asyncio.create_task(failure(pool, f"daemons {tmp_path / 'pids'}"))
    while len(pids := (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []) < 3:
        await asyncio.sleep(0.01)
    (keeper,) = workers()
    scorer = min(keeper.children(), key=lambda child: child.create_time())

    scorer.kill()

    assert (await scoring).kind is FailureKind.DIED
    await all_gone(pids)


async def all_gone(pids: list[str]) -> None:
    """A killed process may take a moment to be gone; these would otherwise live for ten minutes."""
    deadline = asyncio.get_running_loop().time() + 20.0
    while any(is_alive(int(pid)) for pid in pids):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def test_signals_to_all_processes_of_a_step_end_no_worker(open_pool: Callable[..., RewardPool]) -> None:
    """As Slurm sends them before it ends a job, also while a worker starts."""
    pool = open_pool("process")
    first = asyncio.create_task(values(pool, "x"))
    while not first.done():
        signal_workers()
        await asyncio.sleep(0.01)
    signal_workers()

    assert await values(pool, "x") == first.result()


def signal_workers() -> None:
    for process in [each for keeper in workers() for each in (keeper, *keeper.children())]:
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)


async def test_a_function_can_terminate_what_it_has_started(open_pool: Callable[..., RewardPool]) -> None:
    assert await values(open_pool("terminate"), "x") == [1.0]


@pytest.mark.parametrize("victim", ["keeper", "scorer"])
async def test_an_idle_worker_that_has_ended_costs_no_group(open_pool: Callable[..., RewardPool], victim: str) -> None:
    pool = open_pool("process")
    (scorer,) = await values(pool, "x")
    (keeper,) = workers()
    os.kill(keeper.pid if victim == "keeper" else int(scorer), signal.SIGKILL)
    (worker,) = pool._workers
    while not worker.has_ended:
        await asyncio.sleep(0.01)

    assert await values(pool, "x") != [scorer]


async def test_the_event_loop_runs_on_while_a_function_hangs(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("bad", timeout_seconds=1.0)
    await pool.ready()
    scoring = asyncio.create_task(failure(pool, "hang"))
    turns = 0
    while not scoring.done():
        turns += 1
        await asyncio.sleep(0.01)

    assert turns > 10


async def test_more_workers_start_while_requests_wait_and_no_more_than_allowed(
    open_pool: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_GROW_SECONDS", 0.1)
    pool = open_pool("bad", max_workers=2)
    hanging = [asyncio.create_task(failure(pool, "sleep")) for _ in range(3)]
    while len(workers()) < 2:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # after which a third would have started

    assert len(workers()) == 2
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "rewards.worker" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("tests.unit.no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        (f"{FUNCTIONS}:no_such_function", "cannot be imported: AttributeError"),
        (f"{FUNCTIONS}:NO_FUNCTION", "is int, not a function"),
        ("os.path:join", "takes .'a'.; a function that rewards one response takes `sample`"),
        ("task", "only prompts of `data.task` have a scorer of their own"),
    ],
)
async def test_a_scorer_that_cannot_be_used_is_an_error_before_anything_is_scored(
    open_pool: Callable[..., RewardPool], scorer: str, message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        await open_pool(scorer).ready()


async def test_no_worker_is_left_when_the_pool_is_closed(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("process")
    (scorer,) = await values(pool, "x")

    await pool.close()

    assert not is_alive(int(scorer)) and workers() == []


async def test_no_worker_is_told_the_key_of_the_servers(
    open_pool: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A3PO_SERVER_KEY", "5ec2e7")
    await open_pool("process").ready()

    (worker,) = workers()
    assert "5ec2e7" not in worker.environ().values()


async def test_workers_and_what_they_started_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Also where the worker is too busy to see that its pipe is closed."""
    program, pids = tmp_path / "program.py", tmp_path / "pids"
    program.write_text(
        "import asyncio, os, sys\n"
        "from tests.unit.rewards.test_worker_pool import FUNCTIONS, PoolSettings, RewardPool, ScorerSpec, Path, group\n"
        "async def main():\n"
        "    spec = ScorerSpec(scorer=FUNCTIONS + ':bad')\n"
        "    log = Path(sys.argv[1])\n"
        "    settings = {'timeout_seconds': 600, 'max_workers': 1, 'memory_bytes': None}\n"
        "    pool = RewardPool(PoolSettings(spec=spec, log_file=log, **settings))\n"
        "    pool.start()\n"
        "    await pool.score([group('daemons ' + sys.argv[2])])\n"
        "asyncio.run(main())\n"
    )
    run = await asyncio.create_subprocess_exec(
        *(sys.executable, str(program), str(tmp_path / "log"), str(pids)),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    while len(started := pids.read_text().split() if pids.exists() else []) < 3:
        assert run.returncode is None
        await asyncio.sleep(0.01)
    of_run = psutil.Process(run.pid).children(recursive=True)
    assert len(of_run) >= 2 + len(started)

    run.kill()
    await run.wait()

    await all_gone([str(process.pid) for process in of_run])

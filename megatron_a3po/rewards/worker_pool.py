"""The trainer's side of the reward workers: processes that score one request at a time, each with a deadline."""

import asyncio
import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ValidationError

from megatron_a3po.config import RunConfig
from megatron_a3po.config.server_key import KEY_VARIABLE
from megatron_a3po.errors import ConfigError, RewardError
from megatron_a3po.rewards.scorers import ScorerSpec, TaskSpec, WorkerStart
from megatron_a3po.rewards.types import FailureKind, RewardFailure, Sample, Score
from megatron_a3po.rewards.worker import (
    END_SIGNAL,
    HEADER_BYTES,
    MAX_ANSWER_BYTES,
    PREEMPTION_SIGNALS,
    Answer,
    Ready,
    frame,
    length_of,
)
from megatron_a3po.runtime.logging import logger

Outcome = list[Score] | RewardFailure
START_SECONDS = 120.0
"""How long the imports of a reward function may take."""
_END_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """How many workers there may be, and what each may do."""

    spec: ScorerSpec
    max_workers: int
    timeout_seconds: float
    """For one group"""
    memory_bytes: int | None
    """Address space of a worker; None: unlimited"""
    log_file: Path
    grow_seconds: float = 1.0
    """Another worker starts when a request has waited this long."""


def worker_settings(config: RunConfig) -> WorkerSettings:
    """Return the settings of the reward workers. `reward.scorer = auto` is `task` for a task, else `math`."""
    reward, data = config.reward, config.data
    task = TaskSpec(name=data.task, options=data.task_options) if data.task is not None else None
    scorer = reward.scorer
    if scorer == "auto":
        scorer = "task" if task is not None else "math"
    return WorkerSettings(
        spec=ScorerSpec(scorer=scorer, task=task, format_pattern=reward.format_pattern),
        max_workers=reward.max_workers,
        timeout_seconds=reward.timeout_seconds,
        memory_bytes=reward.worker_memory_bytes,
        log_file=config.run_dir / "logs" / "rewards.log",
    )


def try_scorer(config: RunConfig) -> Iterator[str]:
    """Import a user's reward function in a worker, as a run does, and yield a line about it.

    The log of the worker stays if that fails. Raises ConfigError.
    """
    settings = worker_settings(config)
    name = settings.spec.scorer
    if ":" not in name or "://" in name:
        return

    folder = Path(tempfile.mkdtemp(prefix="a3po_scorer_"))

    async def try_worker() -> None:
        workers = RewardWorkers(replace(settings, log_file=folder / "rewards.log"))
        workers.start()
        try:
            await workers.ready()
        finally:
            await workers.close()

    try:
        asyncio.run(try_worker())
    except RewardError as error:
        raise ConfigError(str(error)) from error
    shutil.rmtree(folder)
    yield f"reward.scorer: {name} can be imported"


class RewardWorkers:
    """Score groups in worker processes. Starts with one worker; more start, up to the limit, while requests wait.

    All methods run in one event loop.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._idle: asyncio.LifoQueue[_Worker | RewardError] = asyncio.LifoQueue()
        self._workers: set[_Worker] = set()
        self._starts: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def start(self) -> None:
        """Start the first worker, without waiting for it."""
        self._start_worker()

    async def ready(self) -> None:
        """Wait until a worker can score. Raises RewardError if none can."""
        self._release(await self._take())

    async def raise_if_failed(self) -> None:
        """Raise RewardError if no worker could start. Returns at once, also while a worker still starts."""
        if not self._idle.empty():
            await self.ready()

    async def score(self, groups: Sequence[Sequence[Sample]]) -> list[Outcome]:
        """Return the scores of each group, or why it has none. A failure concerns its own group only.

        Raises RewardError if no worker can start.
        """
        outcomes: list[Outcome] = []
        while len(outcomes) < len(groups):
            worker = await self._take()
            try:
                outcomes += await worker.score(groups[len(outcomes) :], self._settings.timeout_seconds)
            finally:
                if worker.is_usable:
                    self._release(worker)
                else:
                    self._discard(worker)
        return outcomes

    async def close(self) -> None:
        """End all workers and every process that they have started."""
        self._is_closed = True
        for task in self._starts:
            task.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._workers))

    async def _take(self) -> "_Worker":
        while True:
            try:
                async with asyncio.timeout(self._settings.grow_seconds):
                    found = await self._idle.get()
            except TimeoutError:
                if not self._starts and len(self._workers) < self._settings.max_workers:
                    logger.info("responses wait for their rewards: reward worker %d starts", len(self._workers) + 1)
                    self._start_worker()
                continue
            if not isinstance(found, _Worker):
                self._idle.put_nowait(found)  # for every other request that waits
                raise found
            if not found.has_ended:
                return found
            logger.warning("an idle reward worker has ended and is replaced; see %s", self._settings.log_file)
            self._discard(found)

    def _release(self, worker: "_Worker") -> None:
        self._idle.put_nowait(worker)

    def _discard(self, worker: "_Worker") -> None:
        """Replace the worker by a new one."""
        if not self._is_closed:
            self._start_worker(instead_of=worker)

    def _start_worker(self, instead_of: "_Worker | None" = None) -> None:
        task = asyncio.create_task(self._replace(instead_of))
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    async def _replace(self, old: "_Worker | None") -> None:
        if old is not None:
            await old.end()
            self._workers.discard(old)
        worker: _Worker | None = None
        try:
            worker = await _Worker.start(self._settings.log_file)
            self._workers.add(worker)
            settings = self._settings
            await worker.prepare(
                WorkerStart(spec=settings.spec, memory_bytes=settings.memory_bytes, python_path=list(sys.path))
            )
            self._release(worker)
        except (RewardError, OSError) as error:
            if worker is not None:
                await worker.end()
                self._workers.discard(worker)
            failure = (
                error
                if isinstance(error, RewardError)
                else RewardError(f"no reward worker can start: {error}; free processes or memory of this machine")
            )
            self._idle.put_nowait(failure)


class _Worker:
    """One worker (a watchdog and its scorer). After a failure it may not be usable any more."""

    def __init__(self, process: asyncio.subprocess.Process, log_file: Path) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._requests, self._answers = process.stdin, process.stdout
        self._log_file = log_file
        self.is_usable = True

    @classmethod
    async def start(cls, log_file: Path) -> Self:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        # Without a GPU: a library that a reward function imports would take GPU memory from the trainer.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": ""}
        environment.pop(KEY_VARIABLE, None)  # a reward function must not reach the servers
        with log_file.open("ab") as log, _blocked(PREEMPTION_SIGNALS):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "megatron_a3po.rewards.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,
            )
        return cls(process, log_file)

    @property
    def has_ended(self) -> bool:
        """True also while the watchdog still ends the processes of its scorer."""
        return self._process.returncode is not None or self._answers.at_eof()

    async def prepare(self, start: WorkerStart) -> None:
        """Send the first request and wait until the scorer is made. Raises RewardError if it cannot be made."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._send(start)
                ready = await self._receive(Ready)
        except TimeoutError:
            raise RewardError(
                f"reward.scorer = {start.spec.scorer!r}: its imports took more than {START_SECONDS:g} s; see "
                f"{self._log_file}"
            ) from None
        except _Lost:
            raise RewardError(
                f"reward.scorer = {start.spec.scorer!r}: the worker {await self._describe_end()} while it imported the "
                f"scorer; see {self._log_file}, or raise reward.worker_memory_bytes"
            ) from None
        if ready.error is not None:
            raise RewardError(f"{ready.error}; see {self._log_file}")

    async def score(self, groups: Sequence[Sequence[Sample]], timeout_seconds: float) -> list[Outcome]:
        """Return the outcomes in order, at least one, up to a failure after which the worker is not usable."""
        outcomes: list[Outcome] = []
        self.is_usable = False  # until all has gone well, so also if this call is cancelled
        try:
            for group in groups:
                async with asyncio.timeout(timeout_seconds):
                    if not outcomes:
                        await self._send(groups)
                    answer = await self._receive(Answer)
                outcomes.append(_checked(answer.outcome(), group))
                if answer.ends:
                    return outcomes
        except TimeoutError:
            message = f"no reward after reward.timeout_seconds = {timeout_seconds:g} s"
            return [*outcomes, RewardFailure(kind=FailureKind.TIMEOUT, message=message)]
        except _Lost:
            message = f"the reward worker {await self._describe_end()}; see {self._log_file}"
            return [*outcomes, RewardFailure(kind=FailureKind.DIED, message=message)]
        self.is_usable = True
        return outcomes

    async def end(self) -> None:
        """Kill the worker and all its descendants, however busy they are."""
        with suppress(ProcessLookupError):
            self._process.send_signal(END_SIGNAL)
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            logger.warning("reward worker %d does not end and is killed", self._process.pid)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        self._requests.close()

    async def _send(self, message: object) -> None:
        try:
            self._requests.write(frame(pickle.dumps(message)))
            await self._requests.drain()
        except (ConnectionError, RuntimeError):
            raise _Lost from None

    async def _receive[Model: BaseModel](self, model: type[Model]) -> Model:
        try:
            length = length_of(await self._answers.readexactly(HEADER_BYTES))
            if length > MAX_ANSWER_BYTES:
                raise _Lost
            return model.model_validate_json(await self._answers.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError, ValidationError):
            raise _Lost from None

    async def _describe_end(self) -> str:
        try:
            async with asyncio.timeout(_END_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            return "sent an invalid answer"
        number = code - 128 if code > 128 else -code
        if number > 0:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(number).name}"
        return f"ended with exit code {code}"


@contextmanager
def _blocked(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread and in processes that it starts, until those set their own handlers."""
    blocked = set(signals) - signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


class _Lost(Exception):
    """The worker's pipe has ended or has delivered an invalid answer."""


def _checked(outcome: Outcome, group: Sequence[Sample]) -> Outcome:
    if isinstance(outcome, RewardFailure) or len(outcome) == len(group):
        return outcome
    return RewardFailure(kind=FailureKind.INVALID, message=f"{len(outcome)} rewards for {len(group)} responses")

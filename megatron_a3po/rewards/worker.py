"""One reward worker, the program `python -m megatron_a3po.rewards.worker`, and the messages that it exchanges.

A worker is two processes. The scorer runs the reward function. The watchdog only waits, so that no reward function can
stop it. When the scorer ends, when the trainer ends, or on END_SIGNAL, the watchdog kills the scorer and every process
that the reward function has started, including those that left their parent and their session.

The trainer's requests are pickled: JSON turns tuples into lists, and then reasoning-gym's arc_agi and rearc grade right
answers as wrong. A worker is the trainer's child and can trust it. Answers are JSON, so that the trainer executes
nothing that a reward function has put there.
"""

import ctypes
import os
import pickle
import re
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import BufferedReader
from typing import Literal, NoReturn

from pydantic import BaseModel, ConfigDict

from megatron_a3po.errors import RewardError
from megatron_a3po.rewards.scorers import Scorer, WorkerStart, make_scorer
from megatron_a3po.rewards.types import FailureKind, InvalidReward, RewardFailure, Sample, Score
from megatron_a3po.runtime.processes import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_SIGNALLED = 128
"""A watchdog whose scorer was killed by signal n ends with exit code 128 + n, as a shell does."""
END_SIGNAL = signal.SIGRTMIN
"""Ends a watchdog. The trainer sends it; Linux sends it when the trainer has ended."""
PREEMPTION_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""Slurm sends them to every process of a step. The ranks then finish their step and save, and still need rewards."""
_WATCHDOG_SIGNALS = (END_SIGNAL, signal.SIGCHLD)
_MAX_MESSAGE_CHARACTERS = 500
_HEADER = struct.Struct("!Q")
HEADER_BYTES = _HEADER.size
MAX_ANSWER_BYTES = 64 * 1024 * 1024


class Ready(BaseModel):
    """The first answer of a worker: None, or why it cannot score."""

    model_config = ConfigDict(extra="forbid")
    error: str | None


class Answer(BaseModel):
    """The answer for one group: scores or a failure. An answer that `ends` is the worker's last."""

    model_config = ConfigDict(extra="forbid")
    scores: list[tuple[float, str, bool]] | None = None
    failure: tuple[FailureKind, str] | None = None
    ends: Literal[True] | None = None

    def outcome(self) -> list[Score] | RewardFailure:
        """Return the scores of the group's responses, or why there are none."""
        if self.failure is not None:
            return RewardFailure(kind=self.failure[0], message=self.failure[1])
        return [Score(value=value, reason=reason, has_format=ok) for value, reason, ok in self.scores or []]


def frame(content: bytes) -> bytes:
    """Put the length of `content` before it."""
    return _HEADER.pack(len(content)) + content


def length_of(header: bytes) -> int:
    """Return the length in bytes of what follows `header`."""
    return int(_HEADER.unpack(header)[0])


def main() -> NoReturn:
    """Run a worker on the pipes that are its standard input and output."""
    for number in PREEMPTION_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTION_SIGNALS)  # the trainer has blocked them up to here
    requests, answers = os.dup(0), os.dup(1)
    # A reward function reads an empty standard input, and what it prints goes to the log.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The watchdog receives its signals by `sigwait`. Python runs a handler between two instructions, so a handler would
    # not run if the signal came just before a system call that waits. Blocked before the fork, so that none is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHDOG_SIGNALS)
    scorer = os.fork()
    if scorer == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHDOG_SIGNALS)
        _let_children_be_terminated()
        die_with_parent(signal.SIGKILL)
        _score_for_ever(os.fdopen(requests, "rb"), answers)
    os.close(requests)
    os.close(answers)
    die_with_parent(END_SIGNAL)
    _watch(scorer)


def _let_children_be_terminated() -> None:
    """Handle SIGTERM instead of ignoring it: processes that a reward function starts would inherit that."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)

    def reset() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    # Blocked during a fork, so that the child loses no signal that comes before it has the default handler again.
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM})
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


def _watch(scorer: int) -> NoReturn:
    code = 1
    while signal.sigwait(_WATCHDOG_SIGNALS) == signal.SIGCHLD:
        ended, status = _reap(scorer)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(scorer, signal.SIGKILL)
        os.waitpid(scorer, 0)
    _kill_descendants()
    os._exit(code if code >= 0 else _SIGNALLED - code)


def _reap(scorer: int) -> tuple[bool, int]:
    """Wait for the children that have ended; return whether the scorer is among them, and its status.

    The other children are orphans of a reward function.
    """
    pid = -1
    while pid not in (0, scorer):
        pid, status = os.waitpid(-1, os.WNOHANG)
    return pid == scorer, status


def _kill_descendants() -> None:
    """Kill every descendant. Orphans become children of this process, so in the end all descendants are children."""
    with suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        import psutil  # takes a while, and most often there is no descendant left

        while True:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
            os.waitpid(-1, 0)


def _score_for_ever(requests: BufferedReader, answers: int) -> NoReturn:
    """Answer requests until the trainer closes the pipe."""
    own = os.getpid()

    def send(answer: Ready | Answer) -> None:
        if os.getpid() != own:  # a reward function has forked, and its child has returned to this code
            os._exit(0)
        content = frame(answer.model_dump_json().encode())
        while content:
            content = content[os.write(answers, content) :]

    code = 0
    try:
        scorer = _start(requests, send)
        while scorer is not None and (content := _read(requests)) is not None:
            for group in pickle.loads(content):  # from the trainer
                send(answer := _score(scorer, group))
                if answer.ends:
                    os._exit(1)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def _start(requests: BufferedReader, send: Callable[[Ready | Answer], None]) -> Scorer | None:
    content = _read(requests)
    if content is None:
        return None
    start: WorkerStart = pickle.loads(content)
    sys.path[:] = start.python_path
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if start.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (start.memory_bytes, start.memory_bytes))
    try:
        scorer = make_scorer(start.spec)
    except BaseException as error:
        traceback.print_exc()
        unexpected = f"reward.scorer = {start.spec.scorer!r}: {_message(error)}; correct the scorer"
        send(Ready(error=str(error) if isinstance(error, RewardError) else unexpected))
        return None
    send(Ready(error=None))
    return _with_format(scorer, start.spec.format_pattern)


def _score(scorer: Scorer, group: Sequence[Sample]) -> Answer:
    try:
        return Answer(scores=[(score.value, score.reason, score.has_format) for score in scorer(group)])
    except MemoryError as error:
        # What the function keeps is still in memory, in an unknown state.
        return Answer(failure=(FailureKind.MEMORY, _message(error)), ends=True)
    except InvalidReward as error:
        return Answer(failure=(FailureKind.INVALID, str(error)))
    except BaseException as error:
        traceback.print_exc()
        return Answer(failure=(FailureKind.ERROR, _message(error)))


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARACTERS]


def _with_format(scorer: Scorer, pattern: str | None) -> Scorer:
    # In the worker, because matching a pattern can take very long.
    if pattern is None:
        return scorer
    compiled = re.compile(pattern, re.DOTALL)

    def score(samples: Sequence[Sample]) -> list[Score]:
        return [
            replace(score, has_format=compiled.search(sample.response) is not None)
            for sample, score in zip(samples, scorer(samples), strict=True)
        ]

    return score


def _read(requests: BufferedReader) -> bytes | None:
    header = requests.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    content = requests.read(length_of(header))
    return content if len(content) == length_of(header) else None


if __name__ == "__main__":
    main()

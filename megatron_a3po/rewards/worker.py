"""One reward worker, as a program: `python -m megatron_a3po.rewards.worker`. `rewards.pool` starts it.

It is two processes. The scorer runs the reward function. The keeper does nothing but wait, so that no reward function
can keep it from its duty: when the scorer ends, or the trainer ends or asks for it by END_SIGNAL, it kills the scorer
and everything that the reward function has ever started, also what has left its parent and its session.
"""

import ctypes
import os
import pickle
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import BufferedReader
from typing import NoReturn

from megatron_a3po.errors import RewardError
from megatron_a3po.rewards.scorers import Scorer, make_scorer
from megatron_a3po.rewards.types import FailureKind, InvalidReward, Sample, Score
from megatron_a3po.rewards.wire import HEADER_BYTES, Answer, Ready, WorkerStart, frame, length_of
from megatron_a3po.runtime.processes import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_SIGNALLED = 128
"""A keeper whose scorer was killed by signal n ends with exit code 128 + n, as a shell does."""
END_SIGNAL = signal.SIGRTMIN
"""To the keeper. Nobody but the trainer, and Linux when the trainer has ended, sends it."""
PREEMPTION_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""Slurm sends them to every process of a step. The ranks finish their step and save, and need rewards meanwhile."""
_KEEPER_SIGNALS = (END_SIGNAL, signal.SIGCHLD)
_MAX_MESSAGE_CHARACTERS = 500


def main() -> NoReturn:
    for number in PREEMPTION_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTION_SIGNALS)  # the pool has blocked them up to here
    requests, answers = os.dup(0), os.dup(1)
    # What a reward function reads is empty, and what it prints goes to the log.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The keeper takes its signals by `sigwait`: a handler, which Python runs between two instructions, would not run if
    # the signal came just before a system call that waits. Before the fork, so that none is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, _KEEPER_SIGNALS)
    scorer = os.fork()
    if scorer == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _KEEPER_SIGNALS)
        _let_children_be_terminated()
        die_with_parent(signal.SIGKILL)
        _score_for_ever(os.fdopen(requests, "rb"), answers)
    os.close(requests)
    os.close(answers)
    die_with_parent(END_SIGNAL)
    _keep(scorer)


def _let_children_be_terminated() -> None:
    """An ignored SIGTERM would be ignored by whatever a reward function starts, too: it could not end it."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)

    def reset() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    # Blocked meanwhile, so that a fork is not deaf to a signal that comes before it has the default again.
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM})
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


def _keep(scorer: int) -> NoReturn:
    code = 1
    while signal.sigwait(_KEEPER_SIGNALS) == signal.SIGCHLD:
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
    """Whether the scorer is among the children that have ended, and its status. Others are orphans of a reward
    function."""
    pid = -1
    while pid not in (0, scorer):
        pid, status = os.waitpid(-1, os.WNOHANG)
    return pid == scorer, status


def _kill_descendants() -> None:
    """Orphans come to this process, so that in the end all of them are its children."""
    with suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        import psutil  # takes a while, and most often there is nobody left

        while True:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
            os.waitpid(-1, 0)


def _score_for_ever(requests: BufferedReader, answers: int) -> NoReturn:
    """Answer one request after the other until the trainer closes the pipe."""
    own = os.getpid()

    def send(answer: Ready | Answer) -> None:
        if os.getpid() != own:  # a reward function has forked, and its child has come back here
            os._exit(0)
        content = frame(answer.model_dump_json().encode())
        while content:
            content = content[os.write(answers, content) :]

    code = 0
    try:
        scorer = _start(requests, send)
        while scorer is not None and (content := _read(requests)) is not None:
            for group in pickle.loads(content):  # from the trainer's own pipe, see wire.py
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
        send(Ready(error=str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"))
        return None
    send(Ready(error=None))
    return _with_format(scorer, start.spec.format_pattern)


def _score(scorer: Scorer, group: Sequence[Sample]) -> Answer:
    try:
        return Answer(scores=[(score.value, score.reason, score.has_format) for score in scorer(group)])
    except MemoryError as error:
        # Whatever the function keeps is still there, and nobody knows in which state.
        return Answer(failure=(FailureKind.MEMORY, _message(error)), ends=True)
    except InvalidReward as error:
        return Answer(failure=(FailureKind.INVALID, str(error)))
    except BaseException as error:
        traceback.print_exc()
        return Answer(failure=(FailureKind.ERROR, _message(error)))


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARACTERS]


def _with_format(scorer: Scorer, pattern: str | None) -> Scorer:
    # Here and not in the trainer: a pattern can take for ever on a long text.
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

"""Handle the signals of a rank: SIGTERM and SIGUSR1 let it finish its step and save, SIGINT ends it at once."""

import os
import select
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import psutil

from megatron_a3po.runtime.logging import logger

PREEMPTED_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h, "try again later": nothing is wrong, and the same command continues the run"""
INTERRUPTED_EXIT_CODE = 130
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_REPEATED_SECONDS = 2.0
"""A second signal within this time is the same request, sent twice: both Slurm and torchrun signal ranks."""

_LOOK_SECONDS = 0.1
_TAKE_SECONDS = 5.0
"""How long the main thread may stay in a collective before the rank ends without cleaning up; the kernel's signal then
ends other processes of the run"""
_CLEAN_UP_SECONDS = 30.0
"""As long as torchrun waits for a rank. If a library catches the Interrupted, nothing is cleaned up."""


class Interrupted(BaseException):
    """A signal ends the run at once. Not an Exception, so that only the outermost handler catches it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)


class Preempted(BaseException):
    """The run was asked to stop and has saved its state. Not an Exception, for the same reason."""


class Preemption:
    """The request to stop this rank soon. Before `watch` is called, signals make no request."""

    def __init__(self) -> None:
        self.requested_by = 0
        """Number of the signal that asks to stop after the step; 0: none"""
        self._is_looked_at = False
        self._raise_interrupted = False
        self._interrupted_by: int | None = None
        self._is_raised = False
        self._is_over = False

    def look(self) -> int:
        """Return `requested_by`. Before the first look there is nothing to save, and a signal ends the rank at once."""
        self._is_looked_at = True
        return self.requested_by

    def watch(self, *, grace_seconds: float | None) -> None:
        """Handle signals from now on. Call it in the main thread.

        `grace_seconds`: how long finishing the step and saving may take; None: no time. The rank ends when this time is
        over. It ends at once by SIGINT, by another SIGTERM, and when torchrun sends SIGTERM because another of its
        ranks has ended. After `raise_interrupted` it ends by an Interrupted.
        """
        self._grace_seconds = grace_seconds
        self._parent = os.getppid()
        # Python runs its handlers between two instructions of the main thread, which may be waiting in a collective for
        # a rank that is gone. This descriptor is written to at any time.
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, self._handle)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()

    def raise_interrupted(self) -> None:
        """Interrupt the main thread from now on, so that `with` blocks clean up.

        Import large libraries before: some catch everything.
        """
        self._raise_interrupted = True

    def be_over(self) -> None:
        """Ignore signals from now on. The outermost handler calls it when the run has ended."""
        self._is_over = True

    def end_run(self, step: int, signal_number: int) -> NoReturn:
        """Raise Preempted. Signals are ignored afterwards: torchrun sends one when a rank has ended."""
        self._is_over = True
        name = signal.Signals(signal_number).name
        where = f"after step {step}, which is saved" if step > 0 else "before the first step"
        raise Preempted(
            f"ended by {name} {where}; the same command goes on from there (exit code {PREEMPTED_EXIT_CODE})"
        )

    def _handle(self, _signal_number: int, _frame: FrameType | None) -> None:
        if self._interrupted_by is not None and not self._is_raised and not self._is_over:
            self._is_raised = True  # a second one must not interrupt the cleaning up
            raise Interrupted(self._interrupted_by)

    def _watch(self, reader: int) -> None:
        deadline: float | None = None
        terminated_at: float | None = None
        while not self._is_over:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([reader], [], [], remaining)[0]:
                return self._interrupt(self.requested_by, reader)
            # The descriptor gets the number of every signal that somebody handles in Python.
            for number in filter(_SIGNALS.__contains__, os.read(reader, 1 << 10)):
                if self._ends_now(number, terminated_at):
                    return self._interrupt(number, reader)
                if number == signal.SIGTERM and terminated_at is None:
                    terminated_at = time.monotonic()
                if deadline is None and self._grace_seconds is not None:
                    self.requested_by = number
                    deadline = time.monotonic() + self._grace_seconds
        return None

    def _ends_now(self, number: int, terminated_at: float | None) -> bool:
        if number == signal.SIGINT or self._grace_seconds is None or not self._is_looked_at:
            return True
        if number == signal.SIGTERM and terminated_at is not None:
            return time.monotonic() - terminated_at > _REPEATED_SECONDS
        return os.getppid() != self._parent or _is_sibling_gone(self._parent)

    def _interrupt(self, number: int, reader: int) -> None:
        if self._is_over:
            return
        name = signal.Signals(number).name
        if self._raise_interrupted:
            self._interrupted_by = number
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, number)
            if self._comes_to_an_end(reader):
                return
            logger.error("ended by %s, without cleaning up: the main thread is stuck in a call", name)
        else:
            logger.error("ended by %s, with nothing to clean up", name)
        os._exit(INTERRUPTED_EXIT_CODE)

    def _comes_to_an_end(self, reader: int) -> bool:
        """Wait until the main thread has cleaned up; False if it takes too long or the user sends SIGINT again."""
        start = time.monotonic()
        seconds, is_asked_again = 0.0, False
        while not self._is_over and not is_asked_again:
            if seconds > (_CLEAN_UP_SECONDS if self._is_raised else _TAKE_SECONDS):
                break
            if select.select([reader], [], [], _LOOK_SECONDS)[0]:
                is_asked_again = signal.SIGINT in os.read(reader, 1 << 10) and seconds > _REPEATED_SECONDS
            seconds = time.monotonic() - start
        return self._is_over


def _is_sibling_gone(parent: int) -> bool:
    """Tell whether torchrun has fewer ranks now than it has started on this node."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    ranks = 0
    with suppress(psutil.Error):
        for child in psutil.Process(parent).children():
            with suppress(psutil.Error):
                ranks += child.status() != psutil.STATUS_ZOMBIE and "LOCAL_RANK" in child.environ()
    return ranks < int(os.environ["LOCAL_WORLD_SIZE"])

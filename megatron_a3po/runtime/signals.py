"""What signals do to a rank: SIGTERM and SIGUSR1 let it finish its step and save, SIGINT ends it at once."""

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
"""EX_TEMPFAIL of sysexits.h, "try again later": nothing is wrong, and the same command goes on."""
INTERRUPTED_EXIT_CODE = 130
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_REPEATED_SECONDS = 2.0
"""A second signal within this time is the first one by another way: Slurm signals ranks, and torchrun does too."""

_LOOK_SECONDS = 0.1
_TAKE_SECONDS = 5.0
"""How long the main thread may be in a collective before nothing is cleaned up; other processes of the run then end by
the kernel's signal."""
_CLEAN_UP_SECONDS = 30.0
"""As long as torchrun waits for a rank. An Interrupted that something between swallows never cleans up."""


class Interrupted(BaseException):
    """The run ends at once by a signal. Not an Exception, so that nothing but the outermost handler catches it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)


class Preempted(BaseException):
    """The run was asked to stop and has saved what it has learned. Not an Exception, as above."""


class Preemption:
    """Whether this rank has been asked to stop soon. Until `watch` is called, no signal asks it."""

    def __init__(self) -> None:
        self.requested_by = 0
        """Number of the signal that asks to stop after the step; 0: none."""
        self._is_looked_at = False
        self._raise_interrupted = False
        self._interrupted_by: int | None = None
        self._is_raised = False
        self._is_over = False

    def look(self) -> int:
        """`requested_by`. Before the first look nobody would heed it, and there is nothing to save: the rank ends at
        once."""
        self._is_looked_at = True
        return self.requested_by

    def watch(self, *, grace_seconds: float | None) -> None:
        """To be called in the main thread. `grace_seconds`: how long finishing and saving may take; None: no time.

        At its end, and at once by SIGINT, by another SIGTERM, and when torchrun sends SIGTERM because another of its
        ranks has ended, this one just ends; after `raise_interrupted` by an Interrupted.
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
        """From now on interrupt the main thread, so that `with` blocks clean up. Import large libraries before: some
        catch everything."""
        self._raise_interrupted = True

    def be_over(self) -> None:
        """The outermost handler has what ended the run: no signal does anything from now on."""
        self._is_over = True

    def end_run(self, step: int, signal_number: int) -> NoReturn:
        """Raise Preempted, after which no signal disturbs the cleaning up: torchrun sends one when a rank has ended."""
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
            logger.error("ended by %s, without cleaning up: the main thread does not come to it", name)
        else:
            logger.error("ended by %s, with nothing to clean up", name)
        os._exit(INTERRUPTED_EXIT_CODE)

    def _comes_to_an_end(self, reader: int) -> bool:
        """Whether the main thread takes the Interrupted and cleans up, in time and before the user asks once more."""
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
    """Whether torchrun has fewer ranks now than it has started on this node."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    ranks = 0
    with suppress(psutil.Error):
        for child in psutil.Process(parent).children():
            with suppress(psutil.Error):
                ranks += child.status() != psutil.STATUS_ZOMBIE and "LOCAL_RANK" in child.environ()
    return ranks < int(os.environ["LOCAL_WORLD_SIZE"])

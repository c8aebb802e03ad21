"""A process that waits beside a program and ends the program's other processes when it ends, however it ends."""

import os
import signal
import time
from contextlib import suppress

import psutil

from megatron_a3po.runtime.processes import die_with_parent

_END_SECONDS = 5.0
"""After SIGTERM, before SIGKILL: Python's resource tracker removes shared memory when all others have ended."""


def start_keeper() -> None:
    """For a process that leads a session and has no threads yet; of another one, whose group is not its own, nothing.

    The keeper is a child, so that the process that was started stays the one that the parent looks after. It takes the
    kernel's signal for the end of this process by `sigwait`, and no other: nothing else ends it or keeps it busy.
    """
    leader = os.getpid()
    if os.getsid(0) != leader:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if os.fork() == 0:
        _keep(leader)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def group_members(group: int) -> list[psutil.Process]:
    """The processes of a process group, whose leader may be gone.

    Without those that have ended and that nobody collects, as in containers whose first process is no init.
    """
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def _keep(leader: int) -> None:
    die_with_parent(signal.SIGTERM)
    while os.getppid() == leader:  # also where it has ended before it was asked to be told
        signal.sigwait({signal.SIGTERM})
    os.killpg(leader, signal.SIGTERM)
    deadline = time.monotonic() + _END_SECONDS
    while len(group_members(leader)) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(leader, signal.SIGKILL)  # this process too

"""Parents and ends of processes: no process outlives the one that started it, however that one ends."""

import ctypes
import logging
import os
import random
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil

from megatron_a3po.runtime.waiting import wait_until

_PR_SET_PDEATHSIG = 1
_FIRST_PORT = 10000
_END_SECONDS = 5.0
"""After SIGTERM, before SIGKILL: Python's resource tracker removes shared memory when all others have ended."""
# Opened here, since between fork and exec another thread's lock on the loader would never be released.
_LIBC = ctypes.CDLL(None)


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when its parent ends. May be called between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)


def end_process(exit_code: int) -> NoReturn:
    """Flush everything that was written and end this process, but not by way of the interpreter's end.

    There a thread of a process group that drops its last tensor just then waits for a GIL that CPython 3.12 gives to no
    other thread any more, which ends in `std::terminate` (exit code -6). A thread that waits for a peer does the same.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, a closed pipe
            stream.flush()
    os._exit(exit_code)


def start_watchdog() -> None:
    """Fork a watchdog that ends the other processes of this session when this process ends, however it ends.

    Call it in a process that leads a session and has no threads yet; in a process that leads none, it does nothing.
    The watchdog is a child, so that the parent of this process still looks after this process. It waits by `sigwait`
    for the kernel's signal that this process has ended, and takes no other: nothing else ends it or keeps it busy.
    """
    leader = os.getpid()
    if os.getsid(0) != leader:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if os.fork() == 0:
        _watch(leader)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def group_members(group: int) -> list[psutil.Process]:
    """Return the living processes of a process group, whose leader may be gone.

    Leaves out ended processes that nobody collects, as in containers whose first process is no init.
    """
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that nothing listens on, outside the range from which the system gives ports to connections.

    A port from inside that range may go to any connection while a server is still starting. Raises OSError.
    """
    first_given, last_given = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    candidates = [port for port in range(_FIRST_PORT, 1 << 16) if not first_given <= port <= last_given]
    start = random.SystemRandom().randrange(len(candidates))  # leaves the seeded generators alone
    for port in candidates[start:] + candidates[:start]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError(f"no free TCP port on {host} between {_FIRST_PORT} and 65535 outside {first_given}-{last_given}")


def _watch(leader: int) -> NoReturn:
    die_with_parent(signal.SIGTERM)
    while os.getppid() == leader:  # also if it ended before this process asked for the signal
        signal.sigwait({signal.SIGTERM})
    os.killpg(leader, signal.SIGTERM)
    with suppress(TimeoutError):
        wait_until(lambda: len(group_members(leader)) <= 1 or None, _END_SECONDS, look_seconds=0.02)
    os.killpg(leader, signal.SIGKILL)  # this process too
    raise AssertionError("unreachable")

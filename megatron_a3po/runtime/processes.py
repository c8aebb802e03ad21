"""Parents and ends: no process outlives the one that started it, however that one ends."""

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

_PR_SET_PDEATHSIG = 1
_FIRST_PORT = 10000
# Opened here, since between fork and exec another thread's lock on the loader would never be released.
_LIBC = ctypes.CDLL(None)


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when its parent ends. Also usable between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)


def end_process(exit_code: int) -> NoReturn:
    """End this process with everything written, but not by way of the interpreter's end.

    There a thread of a process group that drops its last tensor just then waits for a GIL that CPython 3.12 gives to no
    other thread any more, which ends in `std::terminate` (exit code -6); one that waits for a peer does the same.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, a closed pipe
            stream.flush()
    os._exit(exit_code)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on, outside the range from which the system gives ports to connections.

    One from inside that range may go to anybody's connection while a server is still starting.
    """
    first_given, last_given = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    candidates = [port for port in range(_FIRST_PORT, 1 << 16) if not first_given <= port <= last_given]
    chooser = random.SystemRandom()  # leaves the seeded generators alone
    for port in chooser.sample(candidates, len(candidates)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError(f"no free TCP port on {host} between {_FIRST_PORT} and 65535 outside {first_given}-{last_given}")

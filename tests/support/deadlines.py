"""Deadlines of tests, which are longer on a machine that is slow or busy.

A deadline only ends a test that hangs: no test passes or fails by how fast something was. The factor is measured once,
before the first test, and inherited by all processes that the tests start.
"""

import hashlib
import os
import threading
import time

VARIABLE = "A3PO_TEST_DEADLINE_FACTOR"
_WORK = bytes(64 << 20)
_QUIET_SECONDS = 0.08
"""What the work takes on each of two quiet cores of a server"""
_LARGEST = 30.0


def scaled(seconds: float) -> float:
    """Return a deadline for this machine from one that suits two quiet cores."""
    return seconds * float(os.environ.get(VARIABLE, "1"))


def measure() -> float:
    """Return how many times longer than on quiet cores work takes here now, at least 1, and remember it."""
    if VARIABLE not in os.environ:
        # Hashing lets go of Python's lock, so that every core gets as much to do.
        threads = [threading.Thread(target=hashlib.sha256, args=(_WORK,)) for _ in range(2 * (os.cpu_count() or 1))]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        slowness = (time.perf_counter() - start) / (2 * _QUIET_SECONDS)
        os.environ[VARIABLE] = f"{min(max(slowness, 1.0), _LARGEST):.2f}"
    return float(os.environ[VARIABLE])

"""Measure the seconds of each phase of a step, on one rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Sums host seconds by phase name until they are taken. Nested phases have names like `publish/gather`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the `with` block to the phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call by phase, in order of first use."""
        taken, self._seconds = self._seconds, {}
        return taken

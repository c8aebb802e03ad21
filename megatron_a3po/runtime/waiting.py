"""Wait for something that another thread, process or machine does, by looking repeatedly.

The clock is an argument, so that a test decides what time it is and never sleeps.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

LOOK_SECONDS = 0.2
"""Between two looks, unless a caller needs another rhythm."""
REMIND_SECONDS = 20.0
"""Between two messages that tell the user that a wait goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """The time and the two ways to let it pass."""

    now: Callable[[], float] = time.monotonic
    """Seconds; only differences mean something"""
    sleep: Callable[[float], None] = time.sleep
    sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep


REAL = Clock()


class Wait:
    """One wait: when it is over, and when the user should hear that it goes on."""

    def __init__(self, timeout_seconds: float | None, clock: Clock = REAL) -> None:
        """timeout_seconds: None waits for ever."""
        self._clock = clock
        self._deadline = None if timeout_seconds is None else clock.now() + timeout_seconds
        self._next_reminder = clock.now() + REMIND_SECONDS

    @property
    def is_over(self) -> bool:
        return self._deadline is not None and self._clock.now() >= self._deadline

    @property
    def is_reminder_due(self) -> bool:
        """True once every `REMIND_SECONDS`."""
        if self._clock.now() < self._next_reminder:
            return False
        self._next_reminder = self._clock.now() + REMIND_SECONDS
        return True


def wait_until[T](
    look: Callable[[], T | None],
    timeout_seconds: float | None,
    *,
    look_seconds: float = LOOK_SECONDS,
    remind: Callable[[], None] = lambda: None,
    clock: Clock = REAL,
) -> T:
    """Return the first result of `look` that is not None.

    `remind` is called every 20 s. Raises TimeoutError after `timeout_seconds`, and whatever `look` raises.
    """
    wait = Wait(timeout_seconds, clock)
    while (found := look()) is None:
        _check(wait, timeout_seconds, remind)
        clock.sleep(look_seconds)
    return found


async def wait_until_async[T](
    look: Callable[[], Awaitable[T | None]],
    timeout_seconds: float | None,
    *,
    look_seconds: float = LOOK_SECONDS,
    remind: Callable[[], None] = lambda: None,
    clock: Clock = REAL,
) -> T:
    """Do what `wait_until` does, in an event loop."""
    wait = Wait(timeout_seconds, clock)
    while (found := await look()) is None:
        _check(wait, timeout_seconds, remind)
        await clock.sleep_async(look_seconds)
    return found


def _check(wait: Wait, timeout_seconds: float | None, remind: Callable[[], None]) -> None:
    if wait.is_over:
        raise TimeoutError(f"not within {timeout_seconds:g} s")
    if wait.is_reminder_due:
        remind()

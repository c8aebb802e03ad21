"""Waiting, with a clock that the test moves."""

import pytest

from megatron_a3po.runtime.waiting import Clock, wait_until, wait_until_async


class Time:
    """A clock whose sleeps take no time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.clock = Clock(now=lambda: self.seconds, sleep=self._pass, sleep_async=self._pass_async)

    def _pass(self, seconds: float) -> None:
        self.seconds += seconds

    async def _pass_async(self, seconds: float) -> None:
        self.seconds += seconds


def test_the_first_result_ends_the_wait() -> None:
    time, results = Time(), iter([None, None, 0])
    assert wait_until(lambda: next(results), 60.0, look_seconds=1.0, clock=time.clock) == 0
    assert time.seconds == 2.0


def test_a_wait_looks_once_more_at_its_deadline_and_then_raises() -> None:
    time, looks = Time(), []
    with pytest.raises(TimeoutError, match="3 s"):
        wait_until(lambda: looks.append(time.seconds), 3.0, look_seconds=1.0, clock=time.clock)
    assert looks == [0.0, 1.0, 2.0, 3.0]


async def test_a_wait_in_an_event_loop_reminds_the_user_every_twenty_seconds() -> None:
    time, reminded = Time(), []

    async def look() -> str | None:
        return "there" if time.seconds >= 50.0 else None

    found = await wait_until_async(
        look, None, look_seconds=5.0, remind=lambda: reminded.append(time.seconds), clock=time.clock
    )
    assert found == "there" and reminded == [20.0, 40.0]

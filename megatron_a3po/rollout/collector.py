"""Keep the rollout servers busy while the trainer trains, as far as the staleness budget allows."""

import asyncio
from collections.abc import Awaitable, Callable

from megatron_a3po.rewards.types import RewardFailure
from megatron_a3po.rollout.buffer import StalenessBuffer
from megatron_a3po.rollout.rewarder import FailureWatch
from megatron_a3po.types import Trajectory, TrajectoryGroup


class RolloutCollector[Sampled]:
    """Issue groups in order, collect them in any order, and hand out batches in order.

    All methods run in one event loop.
    """

    def __init__(
        self,
        buffer: StalenessBuffer,
        sample_group: Callable[[int], Awaitable[Sampled]],
        reward_group: Callable[[Sampled], Awaitable[TrajectoryGroup | RewardFailure]],
        watch_servers: Callable[[], Awaitable[None]],
        *,
        max_concurrent_groups: int,
        max_failed_share: float = 0.0,
    ) -> None:
        """Collect groups by `sample_group`, which gets the number of a group, and `reward_group`.

        A group for which `reward_group` fails is dropped and the next one takes its place. More than `max_failed_share`
        of the last 100 groups end the collection. `watch_servers` runs beside it and ends it by what it raises.
        """
        self._buffer = buffer
        self._sample_group = sample_group
        self._reward_group = reward_group
        self._failures = FailureWatch(max_failed_share)
        self._watch_servers = watch_servers
        self._slots = asyncio.Semaphore(max_concurrent_groups)
        self._budget_changed = asyncio.Event()
        self._group_added = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the collection."""
        self._runner = asyncio.create_task(self._run())

    def set_version(self, version: int) -> None:
        """Set the weight version that servers sample with from now on. Raises VersionError if it goes back."""
        self._buffer.set_version(version)
        self._budget_changed.set()

    async def batch_complete(self) -> None:
        """Wait until the next batch is complete. May be cancelled. Raises whatever ends the collection."""
        while self._buffer.missing():
            self._group_added.clear()
            await self.or_failure(self._group_added.wait())

    def take_batch(self) -> list[Trajectory]:
        """Return the next batch in issue order. Raises VersionError for a token that is too old."""
        return self._buffer.take()

    async def or_failure[T](self, work: Awaitable[T]) -> T:
        """Return the result of `work`. Raises whatever ends the collection before that."""
        assert self._runner is not None, "start() comes first"
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._runner}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._runner.result()
            return await task
        finally:
            task.cancel()

    async def stop(self) -> None:
        """End the collection and all requests under way."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_as_coroutine(self._watch_servers()))
                while True:
                    await self._slots.acquire()
                    tasks.create_task(self._collect(await self._admit()))
        except BaseExceptionGroup as group:
            # The first failure is the cause; the others are its consequences in other tasks.
            raise group.exceptions[0] from None

    async def _admit(self) -> int:
        while (group_id := self._buffer.admit()) is None:
            self._budget_changed.clear()
            await self._budget_changed.wait()
        return group_id

    async def _collect(self, group_id: int) -> None:
        try:
            sampled = await self._sample_group(group_id)
        finally:
            self._slots.release()  # servers sample the next group while this one is scored
        rewarded = await self._reward_group(sampled)
        if isinstance(rewarded, RewardFailure):
            self._buffer.drop(group_id, rewarded.kind)
            self._failures.record(rewarded)
            self._budget_changed.set()
        else:
            self._buffer.add(rewarded)
            self._failures.record(None)
        self._group_added.set()


async def _as_coroutine(work: Awaitable[None]) -> None:
    await work

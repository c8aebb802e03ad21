"""An asyncio event loop in a thread of its own, in which rollouts go on while the main thread trains."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class EventLoopThread:
    """The thread and its loop. The main thread stays open to signals while it waits for a result."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def submit[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop, without waiting for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run[T](self, work: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """Wait for the result of a coroutine in the loop."""
        return self.submit(work).result(timeout_seconds)

    def close(self) -> None:
        """Cancel what still runs. Later calls raise a RuntimeError."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()

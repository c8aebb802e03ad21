"""Run work beside the main thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


def in_background[T](work: Callable[[], T], name: str) -> Future[T]:
    """Call `work` in a daemon thread, which keeps no process alive, and return a future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future

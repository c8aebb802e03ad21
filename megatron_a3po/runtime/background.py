"""Work beside the main thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


def in_background[T](work: Callable[[], T], name: str) -> Future[T]:
    """What `work` returns or raises, from a thread that keeps no process alive, as a pool's threads do."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future

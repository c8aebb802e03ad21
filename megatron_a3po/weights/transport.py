"""A process group of the trainer and the rollout servers, beside the trainer's own, and buckets through it."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from megatron_a3po.errors import A3poError, PublishError
from megatron_a3po.runtime.processes import free_port
from megatron_a3po.types import update_group_name

_group_numbers = itertools.count()
_POLL_SECONDS = 0.0005


class WeightReceivers(Protocol):
    """The rollout servers' side of a publication; `rollout.control.ServerControl` is the real one."""

    @property
    def urls(self) -> list[str]: ...
    @property
    def group_world_size(self) -> int: ...
    def create_group(
        self, name: str, address: str, port: int, backend: str, timeout_seconds: float
    ) -> "Future[Any]": ...
    def destroy_group(self, name: str) -> "Future[Any]": ...
    def pause(self) -> None: ...
    def begin(self) -> None: ...
    def update(self, body: dict[str, Any], timeout_seconds: float) -> "Future[None]": ...
    def end(self) -> None: ...
    def resume(self) -> None: ...
    def checksums(self) -> list[list[dict[str, str]]]: ...


class UpdateGroup:
    """Rank 0 is this process; then every rank of every server, in the order of the servers."""

    def __init__(self, receivers: WeightReceivers, *, backend: str, timeout_seconds: float) -> None:
        # A name cannot be used again in one process, so it carries a number.
        self.name = update_group_name(next(_group_numbers))
        self._receivers = receivers
        self._timeout_seconds = timeout_seconds
        with as_publish_error(f"the weight-update group with {', '.join(receivers.urls)} could not be built"):
            address = _local_address(receivers.urls[0])
            port = free_port(address)
            joined = receivers.create_group(self.name, address, port, backend, timeout_seconds)
            join = partial(_join, self.name, f"tcp://{address}:{port}", receivers.group_world_size, backend)
            built = _in_daemon_thread(partial(join, timedelta(seconds=timeout_seconds)))
            # Watched together: a server that refuses never joins, and the building would wait until the timeout.
            done, _ = wait({joined, built}, timeout_seconds, FIRST_EXCEPTION)
            for future in (joined, built):
                if future in done:
                    future.result()
            if len(done) < 2:
                raise TimeoutError(f"not complete after {timeout_seconds:g} s")
            self._group = built.result()

    def send(self, request: dict[str, Any], buffer: Tensor) -> None:
        """Announce one bucket to every server, broadcast it, and wait until all have loaded it. Raises PublishError.

        The answers are watched during the broadcast: a server that refuses never joins it, and the broadcast would wait
        for the group's timeout.
        """
        with as_publish_error(
            f"bucket {request['names'][0]} ... for {', '.join(self._receivers.urls)} was not published"
        ):
            answer = self._receivers.update(request, self._timeout_seconds)
            broadcast = dist.broadcast(buffer, src=0, group=self._group, async_op=True)
            assert broadcast is not None
            while not broadcast.is_completed():
                if answer.done():
                    answer.result()
                time.sleep(_POLL_SECONDS)
            broadcast.wait()
            answer.result(self._timeout_seconds)

    def close(self) -> None:
        with as_publish_error(f"the weight-update group with {', '.join(self._receivers.urls)} could not be ended"):
            left = self._receivers.destroy_group(self.name)
            dist.destroy_process_group(self._group)
            left.result(self._timeout_seconds)


@contextmanager
def as_publish_error(what: str) -> Iterator[None]:
    try:
        yield
    except PublishError:
        raise
    except (A3poError, RuntimeError, OSError) as error:
        raise PublishError(f"{what}: {str(error) or type(error).__name__}") from error


def _join(name: str, address: str, world_size: int, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """As rank 0. Blocks until every rank has joined."""
    store, _, _ = next(c10d.rendezvous(address, 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    # Below dist.new_group, which knows only the default group's ranks: the servers are not among them.
    group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _in_daemon_thread[T](work: Callable[[], T]) -> Future[T]:
    """Not a pool's thread, which would keep a failed process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight-update group", daemon=True).start()
    return future


def _local_address(url: str) -> str:
    """The address of this machine on the way to `url`; nothing is sent."""
    target = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target.hostname, target.port or 80))
        except OSError as error:
            raise PublishError(f"{url} cannot be reached: {error}") from None
        return str(probe.getsockname()[0])

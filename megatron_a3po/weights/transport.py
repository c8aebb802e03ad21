"""A process group of the trainer and the rollout servers, beside the trainer's own, and buckets through it."""

import itertools
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
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
    def destroy_group(self, name: str) -> None: ...
    def pause(self) -> None: ...
    def begin(self) -> None: ...
    def update(self, body: dict[str, Any], timeout_seconds: float) -> "Future[None]": ...
    def end(self) -> None: ...
    def resume(self) -> None: ...
    def checksums(self) -> list[Any]: ...


class UpdateGroup:
    """Rank 0 is this process; then every rank of every server, in the order of the servers."""

    def __init__(self, receivers: WeightReceivers, *, backend: str, timeout_seconds: float) -> None:
        # A name cannot be used again in one process, so it carries a number.
        self.name = update_group_name(next(_group_numbers))
        self._receivers = receivers
        self._timeout_seconds = timeout_seconds
        timeout = timedelta(seconds=timeout_seconds)
        address = _local_address(receivers.urls[0])
        port = free_port(address)
        joined = receivers.create_group(self.name, address, port, backend, timeout_seconds)
        with _as_publish_error(f"the weight-update group with {', '.join(receivers.urls)} could not be built"):
            world_size = receivers.group_world_size
            store, _, _ = next(c10d.rendezvous(f"tcp://{address}:{port}", 0, world_size, timeout=timeout))
            store.set_timeout(timeout)
            # Below dist.new_group, which knows only the default group's ranks: the servers are not among them.
            group, _ = c10d._new_process_group_helper(
                world_size,
                0,
                [],
                c10d.Backend(backend),
                c10d.PrefixStore(self.name, store),
                group_name=c10d.GroupName(self.name),
                timeout=timeout,
            )
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
            c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}
            joined.result(timeout_seconds)

    def send(self, request: dict[str, Any], buffer: Tensor) -> None:
        """Announce one bucket to every server, broadcast it, and wait until all have loaded it. Raises PublishError.

        The answers are watched during the broadcast: a server that refuses never joins it, and the broadcast would wait
        for the group's timeout.
        """
        with _as_publish_error(f"bucket {request['names'][0]} ... was not published"):
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
        self._receivers.destroy_group(self.name)
        dist.destroy_process_group(self._group)


@contextmanager
def _as_publish_error(what: str) -> Iterator[None]:
    try:
        yield
    except (A3poError, RuntimeError, TimeoutError) as error:
        raise PublishError(f"{what}: {error or type(error).__name__}") from error


def _local_address(url: str) -> str:
    """The address of this machine on the way to `url`; nothing is sent."""
    target = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port or 80))
        return str(probe.getsockname()[0])

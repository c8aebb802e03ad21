"""Meet the rollout servers in a process group that has none of the trainer's other ranks."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megatron_a3po.errors import PublishError
from megatron_a3po.runtime.processes import free_port
from megatron_a3po.runtime.waiting import wait_until
from megatron_a3po.weights.store_messages import StoreMessages
from megatron_a3po.weights.wait_times import WaitTimes

_NCCL_ERRORS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}
"""Make NCCL raise its errors and timeouts where a broadcast is waited for. By default they end the process."""


def meeting_place(urls: Sequence[str]) -> tuple[str, int]:
    """Return an address of this machine that the servers at `urls` can reach, and a free port. Sends nothing.

    Raises PublishError for a host that cannot be reached.
    """
    hosts = [urlsplit(url).hostname for url in urls]
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        hosts.append(os.environ["MASTER_ADDR"])  # servers on the loopback are on rank 0's machine
    addresses = list(map(_address_towards, hosts))
    address = next((each for each in addresses if not each.startswith("127.")), addresses[0])
    return address, free_port(address)


def _address_towards(host: str | None) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 80))
        except OSError as error:
            raise PublishError(f"{host} cannot be reached: {error}") from None
        return str(probe.getsockname()[0])


def open_store(place: tuple[str, int], timeout_seconds: float) -> dist.Store:
    """Open the store in which a group's members meet. When it is deleted, members that still wait in it fail."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(*place, is_master=True, wait_for_workers=False, timeout=timeout)


def join_as_first(
    name: str, place: tuple[str, int], world_size: int, backend: str, *, store_timeout: float, group_timeout: float
) -> dist.ProcessGroup:
    """Join the group as its rank 0, at an open store. Timeouts are in seconds.

    Blocks until every rank has joined. NCCL's ranks join in the first broadcast only.
    """
    store = dist.TCPStore(*place, world_size, False, timeout=timedelta(seconds=store_timeout), wait_for_workers=False)
    # dist.new_group takes members of the default group only, and the servers are not among them.
    with _environment(_NCCL_ERRORS):
        group, _ = c10d._new_process_group_helper(
            world_size,
            0,
            [],
            c10d.Backend(backend),
            c10d.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            timeout=timedelta(seconds=group_timeout),
        )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def wait_for_all(
    futures: Sequence[Future[Any]], messages: StoreMessages, timeout_seconds: float | None, times: WaitTimes
) -> None:
    """Wait until all futures are done.

    Raises what the first failed future raises, Stopped when another rank has failed, and TimeoutError after the timeout
    (None: never).
    """
    pending = set(futures)

    def look() -> bool | None:
        nonlocal pending
        done, pending = wait(pending, times.failure_look_seconds, FIRST_COMPLETED)
        for future in done:
            future.result()
        messages.raise_if_stopped()
        return None if pending else True

    # `look` itself waits, so that it notices at once when a future is done.
    wait_until(look, timeout_seconds, look_seconds=0.0, clock=times.clock)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, which a group reads when it is made. No other group is made meanwhile."""
    former = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

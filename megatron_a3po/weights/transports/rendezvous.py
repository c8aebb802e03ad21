"""Meeting the rollout servers in a process group that has none of the trainer's other ranks."""

import os
import socket
import time
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
from megatron_a3po.weights.store_messages import StoreMessages

_LOOK_SECONDS = 0.005
"""Between looks at what others say"""
_NCCL_ERRORS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}
"""NCCL's errors and timeouts are raised where somebody waits for a broadcast: by default they end the process."""
_LATER_SECONDS = 10.0
"""By which the group's own timeout comes after the publisher's, which knows more to tell"""


def meeting_place(urls: Sequence[str]) -> tuple[str, int]:
    """Address and port of this machine, as servers at `urls` can reach them. Nothing is sent."""
    hosts = [urlsplit(url).hostname for url in urls]
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        hosts.append(os.environ["MASTER_ADDR"])  # beside which servers on the loopback are
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
    """Where a group's members meet. When it is deleted, whoever still waits there for others fails."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(*place, is_master=True, wait_for_workers=False, timeout=timeout)


def join_as_first(
    name: str, place: tuple[str, int], world_size: int, backend: str, timeout_seconds: float
) -> dist.ProcessGroup:
    """As rank 0, at an open store. Blocks until every rank has joined; NCCL's join in the first broadcast."""
    timeout = timedelta(seconds=timeout_seconds)
    store = dist.TCPStore(*place, world_size, False, timeout=timeout, wait_for_workers=False)
    # Below dist.new_group, which knows only the default group's ranks: the servers are not among them.
    with _environment(_NCCL_ERRORS):
        group, _ = c10d._new_process_group_helper(
            world_size,
            0,
            [],
            c10d.Backend(backend),
            c10d.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            timeout=timeout + timedelta(seconds=_LATER_SECONDS),
        )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def wait_for_all(futures: Sequence[Future[Any]], messages: StoreMessages, timeout_seconds: float) -> None:
    """Raises what the first of them raises, Stopped when another rank has failed, TimeoutError."""
    deadline = time.monotonic() + timeout_seconds
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, _LOOK_SECONDS, FIRST_COMPLETED)
        for future in done:
            future.result()
        messages.raise_if_stopped()
        if waiting and time.monotonic() > deadline:
            raise TimeoutError(f"not complete after {timeout_seconds:g} s")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Of this process, as a group reads it when it is made; no other one is made meanwhile."""
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

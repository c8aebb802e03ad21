"""A process that takes part in weight-update groups as the only rank of a server."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from multiprocessing.managers import BaseManager
from typing import Any

Json = dict[str, Any]

_TIMEOUT = timedelta(seconds=60.0)
"""No call waits longer for the trainer."""

FORKED = get_context("forkserver")
"""Starts processes as copies of one that has imported torch, which takes seconds"""
FORKED.set_forkserver_preload(["torch.distributed", "tests.support.publishing"])


class Receiver:
    """Starts the process, and keeps every buffer that it receives.

    A group that the process still connects to, though its trainer is gone, keeps no other call waiting.
    """

    def __init__(self, device: str) -> None:
        """device: where the buffers are."""
        self._manager = _Manager(ctx=FORKED)
        self._manager.start(_end_with_parent)
        self._member = self._manager.member(device)
        self._pid: int = self._member.pid()
        self.buffers: list[bytes] = []

    def call(self, command: str, body: Json) -> None:
        """Have it `join`, `receive` or `leave`. Raises RuntimeError where that fails, EOFError where it was killed."""
        result = getattr(self._member, command)(body)
        if result is not None:
            self.buffers.append(result)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._manager.join(5.0)


@contextmanager
def start_receiver(device: str = "cpu") -> Iterator[Receiver]:
    """Start a receiver, and kill its process at the end. device: where its buffers are."""
    receiver = Receiver(device)
    try:
        yield receiver
    finally:
        receiver.kill()


def _end_with_parent() -> None:
    """End this process with its parent, also when that is killed, which a manager does not notice."""
    # A TCPStore asks the resolver for the name of each client, for its log: 5 s where no resolver answers.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"

    def watch() -> None:
        process = parent_process()
        assert process is not None
        connection.wait([process.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Member:
    def __init__(self, device: str) -> None:
        import torch.distributed as dist

        self._device = device
        self._groups: dict[str, Any] = {}
        self._one_at_a_time = threading.Lock()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)

    def pid(self) -> int:
        return os.getpid()

    def join(self, body: Json) -> None:
        with _errors_that_travel():
            self._groups[body["group_name"]] = _join(body)

    def receive(self, body: Json) -> bytes:
        import torch
        import torch.distributed as dist

        sizes = [
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
        ]
        with self._one_at_a_time, _errors_that_travel():
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            dist.broadcast(buffer, src=0, group=self._groups[body["group_name"]])
            return buffer.cpu().numpy().tobytes()

    def leave(self, body: Json) -> None:
        import torch.distributed as dist

        with self._one_at_a_time, _errors_that_travel():
            if body["group_name"] in self._groups:
                dist.destroy_process_group(self._groups.pop(body["group_name"]))


def _join(body: Json) -> Any:
    """Join a group by the steps of SGLang's init_custom_process_group."""
    import torch.distributed.distributed_c10d as c10d

    name, rank, world_size = body["group_name"], body["rank_offset"], body["world_size"]
    address = f"tcp://{body['master_address']}:{body['master_port']}"
    store, _, _ = next(c10d.rendezvous(address, rank, world_size, timeout=_TIMEOUT))
    store.set_timeout(_TIMEOUT)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(body["backend"]),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=_TIMEOUT,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


@contextmanager
def _errors_that_travel() -> Iterator[None]:
    """Raise errors that can be pickled, as some of torch's cannot."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


class _Manager(BaseManager):
    """Serves the calls of each thread in a thread of its own."""


_Manager.register("member", _Member)

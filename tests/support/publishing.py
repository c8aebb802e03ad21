"""Publication from a process of one rank to scripted servers, whose receivers are real ranks of gloo groups."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_a3po.errors import PublishError
from megatron_a3po.fleet.event_loop import EventLoopThread
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.plan import Bucket, PartSpec, make_plan
from megatron_a3po.weights.publisher import Transport, WeightPublisher
from megatron_a3po.weights.shards import Holdings, ParameterShard
from megatron_a3po.weights.transports.group import GroupTransport
from megatron_a3po.weights.wait_times import WaitTimes
from tests.support.receiver import Receiver
from tests.support.scripted_server import FAST, ScriptedServer

Named = list[tuple[str, Tensor]]
UPDATE = "/update_weights_from_distributed"
FROM_DISK = "/update_weights_from_disk"


@contextmanager
def serve(*receivers: Receiver | None) -> Iterator[list[ScriptedServer]]:
    """Start a scripted server for each receiver, in an event loop of their own."""
    loop = EventLoopThread()
    servers = [ScriptedServer(receiver=receiver) for receiver in receivers]
    try:
        for server in servers:
            loop.run(server.__aenter__(), 5.0)
        yield servers
    finally:
        for server in servers:
            loop.run(server.__aexit__(), 5.0)
        loop.close()


@contextmanager
def fleet_of(*urls: str, min_servers: int | None = None, pause_mode: str = "retract") -> Iterator[Fleet]:
    """Connect to the servers, as rank 0 of a run does."""

    async def build() -> ServerPool:
        return ServerPool(list(urls), timeout_seconds=5.0, min_servers=min_servers, pause_mode=pause_mode, timings=FAST)

    loop = EventLoopThread()
    try:
        pool = loop.run(build())
        try:
            loop.run(pool.for_each(pool.describe), 10.0)
            yield Fleet(pool, loop, timeout_seconds=5.0)
        finally:
            loop.run(pool.close(), 5.0)
    finally:
        loop.close()


class OneRank:
    """A source of named tensors, as if a model on one rank had them; planned at the start like a model's.

    failing: numbers of buckets that cannot be collected.
    """

    device = torch.device("cpu")

    def __init__(self, tensors: Callable[[], Named], bucket_bytes: int) -> None:
        self._tensors = tensors
        first = tensors()
        shards = {name: ParameterShard(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in first}
        held = Holdings(rank=0, stage=0, tensor_group=(0,), expert_group=(0,), shards=shards)
        parts = [
            PartSpec(
                shapes={name: tuple(tensor.shape)},
                tensors=(TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)),),
            )
            for name, tensor in first
        ]
        self.plan = make_plan(parts, [held], bucket_bytes=bucket_bytes)
        self.filled: list[int] = []
        self.failing: set[int] = set()

    def fill(self, bucket: Bucket, buffer: Tensor | None) -> None:
        self.filled.append(bucket.number)
        present = dict(self._tensors())
        for name, view in bucket.views(buffer).items() if buffer is not None else ():
            view.copy_(present[name])
        if bucket.number in self.failing:
            raise PublishError("w is not finite")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors()


def world() -> dist.ProcessGroup:
    """Return the default group, which stands for the gloo group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def make_publisher(
    source: OneRank,
    fleet: Fleet,
    timeout_seconds: float,
    *,
    times: WaitTimes | None = None,
    fallback: Transport | None = None,
) -> WeightPublisher:
    """Build a publisher that sends through process groups."""
    groups = GroupTransport(
        source.plan, fleet, world(), run_id="test", backend="gloo", timeout_seconds=timeout_seconds, times=times
    )
    return WeightPublisher(source, groups, fleet, world(), timer=PhaseTimer(), fallback=fallback)


@contextmanager
def publishing(
    servers: list[ScriptedServer],
    tensors: Callable[[], Named],
    *,
    bucket_bytes: int = 1 << 20,
    timeout_seconds: float = 20.0,
    times: WaitTimes | None = None,
) -> Iterator[WeightPublisher]:
    """Publish to the servers through process groups."""
    with (
        fleet_of(*(server.url for server in servers)) as fleet,
        make_publisher(OneRank(tensors, bucket_bytes), fleet, timeout_seconds, times=times) as publisher,
    ):
        yield publisher


def some_tensors() -> Named:
    generator = torch.Generator().manual_seed(0)
    return [
        ("model.embed_tokens.weight", torch.randn(7, 4, generator=generator)),
        ("model.layers.0.norm.weight", torch.randn(4, generator=generator, dtype=torch.bfloat16)),
        ("model.layers.0.q_proj.weight", torch.randn(4, 8, generator=generator, dtype=torch.bfloat16).t()),
        ("model.layers.0.scale", torch.tensor(3.0)),
        ("model.norm.weight", torch.randn(4, generator=generator)),
    ]


def large_tensors() -> Named:
    """More than what fits into the buffers of a connection: the broadcast waits for the receivers."""
    return [("model.embed_tokens.weight", torch.zeros(1)), ("model.layers.0.norm.weight", torch.zeros(8 << 20))]


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

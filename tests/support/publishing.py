"""Publication from a process of one rank to scripted servers, whose receivers are real ranks of gloo groups."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_a3po.errors import PublishError
from megatron_a3po.fleet.event_loop import EventLoopThread
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import GenerateResponse
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.fleet.timings import FleetTimings
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.plan import Bucket, PartSpec, make_plan
from megatron_a3po.weights.publisher import Transport, WeightPublisher
from megatron_a3po.weights.shards import Holdings, ParameterShard
from megatron_a3po.weights.transports.group import GroupTransport
from megatron_a3po.weights.wait_times import WaitTimes
from tests.support.deadlines import scaled
from tests.support.receiver import Receiver
from tests.support.scripted_server import DEADLINE_SECONDS, FAST, REQUEST, ScriptedServer

Named = list[tuple[str, Tensor]]
UPDATE = "/update_weights_from_distributed"
FROM_DISK = "/update_weights_from_disk"
JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
CONTINUE = "/continue_generation"
SHORT = WaitTimes(late_server_seconds=0.1, abort_seconds=0.5)


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
def fleet_of(*urls: str, timings: FleetTimings = FAST, **options: Any) -> Iterator[Fleet]:
    """Connect to the servers, as rank 0 of a run does."""

    async def build() -> ServerPool:
        return ServerPool(list(urls), timeout_seconds=5.0, timings=timings, **options)

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


class Run:
    """A publisher of one rank, and its servers."""

    def __init__(self, servers: list[ScriptedServer], fleet: Fleet, publisher: WeightPublisher) -> None:
        self.servers, self.fleet, self.publisher = servers, fleet, publisher
        self.seconds = 0.0
        """How long the last publication took, also when it failed"""

    def publish(self, version: int) -> dict[str, float]:
        start = time.monotonic()
        try:
            return self.publisher.publish(version)
        finally:
            self.seconds = time.monotonic() - start
            assert self.seconds < DEADLINE_SECONDS, "less than a silent server stays silent"

    def sampled(self) -> tuple[set[str], set[int]]:
        """URLs of the servers that answer requests, and the versions of what is accepted."""
        pool, before = self.fleet.pool, [len(server.bodies("/generate")) for server in self.servers]
        for server in self.servers:
            server.generation_seconds = lambda _: 0.05

        async def sample() -> list[list[GenerateResponse]]:
            return await asyncio.gather(*(pool.generate(REQUEST) for _ in range(4)))

        answers = self.fleet.loop.run(sample(), scaled(10.0))
        counts = zip(self.servers, before, strict=True)
        asked = {server.url for server, count in counts if len(server.bodies("/generate")) > count}
        return asked, {int(span.version) for (answer,) in answers for span in answer.meta_info.weight_versions}

    @property
    def quarantined(self) -> list[str]:
        return [server.url for server in self.fleet.pool.membership.quarantined]


@contextmanager
def running(
    *receivers: Receiver | None,
    tensors: Callable[[], Named] | None = None,
    bucket_bytes: int = 120,
    timeout_seconds: float = 20.0,
    times: WaitTimes | None = None,
    num_known: int | None = None,
    **options: Any,
) -> Iterator[Run]:
    """Publish through process groups to a server for each receiver, of which the first `num_known` are known."""
    with (
        serve(*receivers) as servers,
        fleet_of(*(server.url for server in servers[:num_known]), **options) as fleet,
        make_publisher(
            OneRank(tensors or some_tensors, bucket_bytes), fleet, timeout_seconds, times=times or SHORT
        ) as publisher,
    ):
        yield Run(servers, fleet, publisher)


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

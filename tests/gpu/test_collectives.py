"""NCCL beside gloo in one default group, and weights that a trainer on one GPU sends to a server on another.

On CPUs, the same functions go through gloo alone.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from aiohttp import web

from megatron_a3po.errors import PublishError
from megatron_a3po.parallel.layout import RankInfo, init_distributed
from megatron_a3po.parallel.reduce import reduce_named
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.publisher import WeightPublisher
from megatron_a3po.weights.transports.group import GroupTransport
from tests.distributed.launch import run_ranks
from tests.gpu.environment import needs_gpus
from tests.support.deadlines import scaled
from tests.support.publishing import UPDATE, Named, OneRank, as_bytes, fleet_of, serve
from tests.support.receiver import Json, Receiver, start_receiver
from tests.support.scripted_server import ScriptedServer, close_connection, refuse

Device = Literal["cuda", "cpu"]
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.distributed),
    pytest.param("cuda", marks=needs_gpus(2, transformer_engine=False)),
]
WORLD_SIZE = 2
TIMEOUT_SECONDS = 60.0
"""Of a publication; what goes wrong shows much earlier."""


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    name: Device = request.param
    return name


@pytest.fixture(scope="module")
def receiver(device: Device) -> Iterator[Receiver]:
    with start_receiver("cuda:1" if device == "cuda" else "cpu") as started:
        yield started


def test_tensors_travel_by_the_devices_backend_and_those_on_the_cpu_by_gloo_beside_the_waiting_group(
    device: Device,
) -> None:
    output = run_ranks(exchange, WORLD_SIZE, device, timeout_seconds=150, with_gpus=device == "cuda")
    assert "exchanged" in output


def test_published_weights_reach_a_server_on_another_device_bit_for_bit(device: Device, receiver: Receiver) -> None:
    with serve(receiver) as (server,):
        _run_trainer(publish_twice, device, server)
        assert _received(server, receiver) == [_expected(1), _expected(2)]


def test_a_server_that_refuses_the_first_bucket_is_an_error_and_the_trainer_can_publish_again(
    device: Device, receiver: Receiver
) -> None:
    with serve(receiver) as (server,):
        server.script(UPDATE, refuse(400, "unknown dtype"), calls=range(1, 2))
        output = _run_trainer(fail_and_publish, device, server)
        assert f"{server.url}{UPDATE} answered 400" in output
        assert "unknown dtype" in output
        assert _received(server, receiver) == [_expected(2)]


def test_a_server_that_is_killed_in_a_broadcast_is_an_error_and_the_trainer_goes_on(
    device: Device, receiver: Receiver
) -> None:
    """The last test with the receiver."""
    with serve(receiver) as (server,):

        async def die(request: web.Request, body: Json) -> web.StreamResponse:
            await asyncio.sleep(1.0)  # for the trainer to be in the broadcast, which cannot end
            receiver.kill()
            for path in ("/destroy_weights_update_group", "/end_weight_update"):
                server.script(path, close_connection)
            return await close_connection(request, body)

        server.script(UPDATE, die, calls=range(2, 3))
        output = _run_trainer(publish_and_fail, device, server)
        assert "version 2 was not published" in output
        assert server.version == "unfinished 2"


def _run_trainer(function: Callable[..., None], device: Device, server: ScriptedServer) -> str:
    output = run_ranks(function, 1, device, server.url, timeout_seconds=150, with_gpus=device == "cuda")
    assert "the trainer is well" in output
    return output


def _received(server: ScriptedServer, receiver: Receiver) -> list[dict[str, bytes]]:
    """Publication by publication, all tensors by name. Empties the receiver."""
    publications: list[dict[str, bytes]] = [{}]
    requests = server.bodies(UPDATE)[-len(receiver.buffers) :]  # those before were refused
    for request, buffer in zip(requests, receiver.buffers, strict=True):
        start = 0
        for name, dtype, shape in zip(request["names"], request["dtypes"], request["shapes"], strict=True):
            assert name not in publications[-1]
            end = start + torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            publications[-1][name] = buffer[start:end]
            start = end
        assert start == len(buffer)
        if "weight_version" in request:
            publications.append({})
    receiver.buffers.clear()
    return publications[:-1]


def _expected(version: int) -> dict[str, bytes]:
    return {name: as_bytes(tensor) for name, tensor in _weights("cpu", version)}


def _weights(where: torch.device | str, version: int) -> Named:
    """The same numbers on every device, in several buckets. The first one is more than what fits into the buffers of a
    connection, so that its broadcast waits for the receiver."""
    generator = torch.Generator().manual_seed(version)
    sizes = {0: 4 << 20} | {number: number * 70_001 for number in range(1, 9)}
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)
    return [
        (f"weight {number}", torch.randn(size, generator=generator).to(where, dtypes[number % 3]))
        for number, size in sizes.items()
    ]


def _join(device: Device) -> tuple[RankInfo, torch.device, dist.ProcessGroup]:
    """This rank, its device, and the group in which ranks wait."""
    info = RankInfo.from_environment()
    gloo_group = init_distributed(info, device, scaled(60.0))
    return info, torch.device(device, info.local_rank) if device == "cuda" else torch.device("cpu"), gloo_group


def exchange(device: Device) -> None:
    info, where, gloo_group = _join(device)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        values = torch.arange(1000, device=where).remainder(100).to(dtype) + info.rank
        total = values.clone()
        dist.all_reduce(total)
        assert torch.equal(total.cpu(), (2 * torch.arange(1000).remainder(100) + 1).to(dtype))
        dist.broadcast(values, src=1)
        assert torch.equal(values.cpu(), (torch.arange(1000).remainder(100) + 1).to(dtype))
    # Trajectories travel as tensors on the CPU through the same default group.
    sizes = torch.tensor([info.rank + 1])
    dist.broadcast(sizes, src=1)
    assert sizes.item() == 2

    everyone = dist.group.WORLD
    assert everyone is not None
    alone = [dist.new_group([rank]) for rank in range(WORLD_SIZE)][info.rank]
    local = (
        {"sum": torch.tensor(1.0 + info.rank, device=where).double()},
        {"largest": torch.tensor(float(info.rank), device=where).double()},
    )
    sums, maxima = reduce_named(
        local, sums=("sum",), maxima=("largest",), data_group=everyone, pipeline_group=alone, device=where
    )
    assert (sums, maxima) == ({"sum": 3.0}, {"largest": 1.0})

    assert dist.get_backend(gloo_group) == "gloo"
    said = [torch.zeros(1, dtype=torch.int64) for _ in range(WORLD_SIZE)]
    dist.all_gather(said, torch.tensor([info.rank]), group=gloo_group)
    assert [int(rank) for rank in said] == list(range(WORLD_SIZE))
    if device == "cuda":
        assert all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()), "packs differ in length"
    if info.rank == 0:
        print("exchanged", flush=True)
    dist.destroy_process_group()


def publish_twice(device: Device, url: str) -> None:
    _, where, gloo_group = _join(device)
    with _publishing(url, where, gloo_group) as publish:
        publish(1)
        publish(2)
    _say_that_all_is_well(where)


def fail_and_publish(device: Device, url: str) -> None:
    _, where, gloo_group = _join(device)
    with _publishing(url, where, gloo_group) as publish:
        _fail(publish, 1)
    with _publishing(url, where, gloo_group) as publish:
        publish(2)
    _say_that_all_is_well(where)


def publish_and_fail(device: Device, url: str) -> None:
    _, where, gloo_group = _join(device)
    with _publishing(url, where, gloo_group, num_weights=1) as publish:
        publish(1)
        _fail(publish, 2)
    _say_that_all_is_well(where)


@contextmanager
def _publishing(
    url: str, where: torch.device, gloo_group: dist.ProcessGroup, *, num_weights: int | None = None
) -> Iterator[Callable[[int], None]]:
    """A function that publishes the weights of a version as that version."""
    present = _weights(where, 0)[:num_weights]
    source = OneRank(lambda: present, bucket_bytes=1 << 20)
    source.device = where
    backend = "nccl" if where.type == "cuda" else "gloo"
    with fleet_of(url) as fleet:
        groups = GroupTransport(
            source.plan, fleet, gloo_group, run_id="test", backend=backend, timeout_seconds=TIMEOUT_SECONDS
        )
        with WeightPublisher(source, groups, fleet, gloo_group, timer=PhaseTimer()) as publisher:

            def publish(version: int) -> None:
                present[:] = _weights(where, version)[:num_weights]
                publisher.publish(version)

            yield publish


def _fail(publish: Callable[[int], None], version: int) -> None:
    start = time.monotonic()
    with pytest.raises(PublishError) as failure:
        publish(version)
    assert time.monotonic() - start < TIMEOUT_SECONDS
    print(failure.value, flush=True)


def _say_that_all_is_well(where: torch.device) -> None:
    ones = torch.ones(1000, device=where)
    dist.all_reduce(ones)
    assert float(ones.sum()) == 1000
    print("the trainer is well", flush=True)

"""NCCL beside gloo in one default group, and weights that a trainer on one GPU sends to a server on another."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from tests.distributed.launch import run_ranks
from tests.gpu.environment import needs_gpus

pytestmark = needs_gpus(2, transformer_engine=False)

WORLD_SIZE = 2


def test_tensors_on_gpus_travel_by_nccl_and_those_on_the_cpu_by_gloo_beside_the_waiting_group() -> None:
    output = run_ranks(exchange, WORLD_SIZE, "cuda", timeout_seconds=150, with_gpus=True)
    assert "exchanged" in output


def test_published_weights_reach_a_server_on_another_gpu_bit_for_bit() -> None:
    output = run_ranks(publish, WORLD_SIZE, "cuda", timeout_seconds=150, with_gpus=True)
    assert "published" in output


def _join(device: Literal["cuda", "cpu"]) -> tuple[Any, Any, Any]:
    """This rank, its device, and the group in which ranks wait."""
    import torch

    from megatron_a3po.parallel.layout import RankInfo, init_distributed

    info = RankInfo.from_environment()
    waiting = init_distributed(info, device, 60.0)
    return info, torch.device(device, info.local_rank) if device == "cuda" else torch.device("cpu"), waiting


def exchange(device: Literal["cuda", "cpu"]) -> None:
    import torch
    import torch.distributed as dist

    from megatron_a3po.parallel.reduce import reduce_statistics

    info, where, waiting = _join(device)
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
        torch.tensor([1.0 + info.rank], device=where).double(),
        torch.tensor([float(info.rank)], device=where).double(),
    )
    sums, maxima = reduce_statistics(
        local, num_sums=1, num_maxima=1, data_group=everyone, pipeline_group=alone, device=where
    )
    assert (sums, maxima) == ([3.0], [1.0])

    assert dist.get_backend(waiting) == "gloo"
    said = [torch.zeros(1, dtype=torch.int64) for _ in range(WORLD_SIZE)]
    dist.all_gather(said, torch.tensor([info.rank]), group=waiting)
    assert [int(rank) for rank in said] == list(range(WORLD_SIZE))
    if info.rank == 0:
        print("exchanged", flush=True)
    dist.destroy_process_group()


def publish(device: Literal["cuda", "cpu"]) -> None:
    """Rank 0 publishes; rank 1 takes the steps of a server."""
    import torch.distributed as dist

    from megatron_a3po.config import PublishConfig
    from megatron_a3po.runtime.timing import PhaseTimer
    from megatron_a3po.weights.publisher import WeightPublisher

    info, where, waiting = _join(device)
    if info.rank == 0:
        config = PublishConfig(bucket_bytes=1 << 20, timeout_seconds=60)
        receivers: Any = _OneServer(waiting)
        backend = "nccl" if device == "cuda" else "gloo"
        with WeightPublisher(
            config, lambda: _weights(where), receivers, backend=backend, timer=PhaseTimer()
        ) as publisher:
            publisher.publish(1)
            publisher.publish(2)
        receivers.tell("compare")
        print("published", flush=True)
    else:
        _serve(where, waiting)
    dist.barrier(group=waiting)
    dist.destroy_process_group()


def _weights(where: Any) -> list[tuple[str, Any]]:
    """Of several dtypes and sizes, more than one bucket together; the same numbers on every device."""
    import torch

    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float32)
    return [
        (f"weight {number}", torch.randn(number + 1, 70_001, generator=generator).to(where, dtypes[number % 3]))
        for number in range(9)
    ]


class _OneServer:
    """Rank 0's side of a server that is rank 1: commands travel through the waiting group."""

    urls = ("http://127.0.0.1:1",)
    group_world_size = 2

    def __init__(self, waiting: Any) -> None:
        self._waiting = waiting

    def tell(self, command: str, *arguments: Any) -> "Future[None]":
        import torch.distributed as dist

        dist.broadcast_object_list([command, arguments], src=0, group=self._waiting)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def create_group(self, name: str, address: str, port: int, backend: str, timeout_seconds: float) -> "Future[None]":
        return self.tell("join", name, address, port, backend)

    def update(self, body: dict[str, Any], timeout_seconds: float) -> "Future[None]":
        return self.tell("receive", body)

    def destroy_group(self, name: str) -> "Future[None]":
        return self.tell("leave", name)

    def pause(self) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def resume(self) -> None: ...


def _serve(where: Any, waiting: Any) -> None:
    """What a server does with each command, until it has compared what it received with what it should have."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    group: Any = None
    received: dict[str, Any] = {}

    def join(name: str, address: str, port: int, backend: str) -> None:
        nonlocal group
        # The steps of SGLang's init_custom_process_group.
        timeout = timedelta(seconds=60)
        store, _, _ = next(c10d.rendezvous(f"tcp://{address}:{port}", 1, WORLD_SIZE, timeout=timeout))
        prefixed = c10d.PrefixStore(name, store)
        group, _ = c10d._new_process_group_helper(
            WORLD_SIZE, 1, [], c10d.Backend(backend), prefixed, group_name=c10d.GroupName(name), timeout=timeout
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(WORLD_SIZE)}

    def receive(body: dict[str, Any]) -> None:
        shapes = [torch.Size(shape) for shape in body["shapes"]]
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=where)
        dist.broadcast(buffer, src=0, group=group)
        parts = zip(body["names"], buffer.split(sizes), shapes, dtypes, strict=True)
        received.update({name: part.view(dtype).view(shape) for name, part, shape, dtype in parts})

    def compare() -> None:
        expected = dict(_weights(where))
        assert received.keys() == expected.keys()
        assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())

    commands: dict[str, Callable[..., None]] = {
        "join": join,
        "receive": receive,
        "leave": lambda _: dist.destroy_process_group(group),
        "compare": compare,
    }
    command = ""
    while command != "compare":
        said: list[Any] = [None, None]
        dist.broadcast_object_list(said, src=0, group=waiting)
        command, arguments = said
        commands[command](*arguments)

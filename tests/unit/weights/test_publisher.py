"""Weights on the wire to scripted servers, whose fleet are real ranks of a gloo group in processes of their own."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
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
from megatron_a3po.weights.publisher import WeightPublisher
from megatron_a3po.weights.shards import Holdings, ParameterShard
from megatron_a3po.weights.transports.group import GroupTransport
from tests.support.paths import ROOT
from tests.support.receiver import Receiver, start_receiver
from tests.support.scripted_server import ScriptedServer, answer, hang, refuse

Named = list[tuple[str, Tensor]]
UPDATE = "/update_weights_from_distributed"


@pytest.fixture(scope="module", autouse=True)
def default_group() -> Iterator[None]:
    """The group that a trainer always has."""
    with pytest.MonkeyPatch.context() as patch:
        # A TCPStore asks the resolver for the name of each client, for its log: 5 s where no resolver answers.
        patch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=10))
        yield
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def first_receiver() -> Iterator[Receiver]:
    with start_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def second_receiver() -> Iterator[Receiver]:
    with start_receiver() as receiver:
        yield receiver


@pytest.fixture(autouse=True)
def forget_buffers(request: pytest.FixtureRequest) -> None:
    for name in {"first_receiver", "second_receiver"} & set(request.fixturenames):
        request.getfixturevalue(name).buffers.clear()


@contextmanager
def serve(*fleet: Receiver | None) -> Iterator[list[ScriptedServer]]:
    loop = EventLoopThread()
    servers = [ScriptedServer(receiver=receiver) for receiver in fleet]
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
    async def build() -> ServerPool:
        return ServerPool(list(urls), timeout_seconds=5.0, min_servers=min_servers, pause_mode=pause_mode)

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
    """Named tensors as if a model of one rank had them, planned at the start like a model's."""

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

    def fill(self, bucket: Bucket, buffer: Tensor | None) -> None:
        self.filled.append(bucket.number)
        present = dict(self._tensors())
        for name, view in bucket.views(buffer).items() if buffer is not None else ():
            view.copy_(present[name])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors()


@contextmanager
def publishing(
    servers: list[ScriptedServer],
    tensors: Callable[[], Named],
    *,
    bucket_bytes: int = 1 << 20,
    timeout_seconds: float = 20.0,
) -> Iterator[WeightPublisher]:
    with (
        fleet_of(*(server.url for server in servers)) as fleet,
        make_publisher(OneRank(tensors, bucket_bytes), fleet, timeout_seconds) as publisher,
    ):
        yield publisher


def make_publisher(source: OneRank, fleet: Fleet, timeout_seconds: float) -> WeightPublisher:
    group = dist.group.WORLD
    assert group is not None
    groups = GroupTransport(source.plan, fleet, group, run_id="test", backend="gloo", timeout_seconds=timeout_seconds)
    return WeightPublisher(source, groups, fleet, group, timer=PhaseTimer())


def timed_publish(publisher: WeightPublisher, version: int, seconds: list[float]) -> None:
    """Publish and append how long it took, also when it fails."""
    start = time.monotonic()
    try:
        publisher.publish(version)
    finally:
        seconds.append(time.monotonic() - start)


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
    """More than what fits into the buffers of a connection: the broadcast waits for the fleet."""
    return [("model.embed_tokens.weight", torch.zeros(1)), ("model.layers.0.norm.weight", torch.zeros(8 << 20))]


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_every_server_receives_the_tensors_bytes_in_order_and_the_version_with_the_last_bucket(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    tensors = some_tensors()
    with (
        serve(first_receiver, second_receiver) as servers,
        publishing(servers, lambda: tensors, bucket_bytes=190) as publisher,
    ):
        publisher.publish(3)
        sent = [server.bodies(UPDATE) for server in servers]
        paths = servers[0].paths()
        versions = [server.version for server in servers]

    assert sent[0] == sent[1]
    requests = sent[0]
    ordered = [tensors[number] for number in (0, 3, 1, 2, 4)]  # in a bucket, those of larger items come first
    assert [len(request["names"]) for request in requests] == [4, 1]
    assert [name for request in requests for name in request["names"]] == [name for name, _ in ordered]
    assert [shape for request in requests for shape in request["shapes"]] == [list(t.shape) for _, t in ordered]
    dtypes = [dtype for request in requests for dtype in request["dtypes"]]
    assert dtypes == ["float32", "float32", "bfloat16", "bfloat16", "float32"]
    assert [request["flush_cache"] for request in requests] == [False, True]
    assert [request.get("weight_version") for request in requests] == [None, "3"]
    assert {request["load_format"] for request in requests} == {"flattened_bucket"}
    assert versions == ["3", "3"]
    for receiver in (first_receiver, second_receiver):
        assert b"".join(receiver.buffers) == b"".join(as_bytes(tensor) for _, tensor in ordered)
    assert paths == [
        "/destroy_weights_update_group",
        "/init_weights_update_group",
        "/pause_generation",
        "/begin_weight_update",
        "/update_weight_version",
        *[UPDATE] * 2,
        "/end_weight_update",
        "/weights_checker",
        "/continue_generation",
    ]


def test_ranks_of_the_group_follow_the_servers_and_its_end_leaves_no_group_behind(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with serve(first_receiver, second_receiver) as servers:
        with publishing(servers, some_tensors) as publisher:
            publisher.publish(0)
        joined = [server.bodies("/init_weights_update_group")[0] for server in servers]
        left = [server.bodies("/destroy_weights_update_group") for server in servers]

    assert [(body["rank_offset"], body["world_size"]) for body in joined] == [(1, 3), (2, 3)]
    assert joined[0]["master_address"] == "127.0.0.1" and joined[0]["backend"] == "gloo"
    name = joined[0]["group_name"]
    # Before it is built, a run that died may have left one there.
    assert left == [[{"group_name": name}] * 2] * 2
    assert name not in dist.distributed_c10d._world.pg_names.values()


def test_many_publications_go_through_one_group(first_receiver: Receiver) -> None:
    weight = torch.zeros(1000)
    with serve(first_receiver) as (server,), publishing([server], lambda: [("w", weight.clone())]) as publisher:
        for version in range(20):
            weight.fill_(version)
            publisher.publish(version)
            assert server.version == str(version)

    assert first_receiver.buffers == [as_bytes(torch.full((1000,), float(version))) for version in range(20)]


def test_buckets_stay_within_their_bound_and_a_larger_tensor_travels_alone(first_receiver: Receiver) -> None:
    sizes = [3, 3, 3, 100, 1, 1]
    tensors = [(f"t{number}", torch.full((size,), float(number))) for number, size in enumerate(sizes)]
    with serve(first_receiver) as (server,), publishing([server], lambda: tensors, bucket_bytes=24) as publisher:
        publisher.publish(0)
        names = [request["names"] for request in server.bodies(UPDATE)]

    assert names == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"]]
    assert [len(buffer) for buffer in first_receiver.buffers] == [24, 12, 400, 8]


def test_a_refusal_during_the_broadcast_ends_the_publication_at_once_and_nothing_is_resumed(
    first_receiver: Receiver,
) -> None:
    with serve(first_receiver) as (server,):
        server.script(UPDATE, refuse(400, "partially updated: size mismatch"), calls=range(2, 3))
        seconds: list[float] = []
        with (
            pytest.raises(PublishError, match=rf"layers\.0\.norm.*{server.url}.*400.*size mismatch"),
            publishing([server], large_tensors) as publisher,
        ):
            timed_publish(publisher, 5, seconds)
        assert seconds[0] < 15.0
        undone = ["/destroy_weights_update_group", "/end_weight_update"]
        assert server.paths()[-3:] == [UPDATE, *undone]
        assert server.version == "unfinished 5"


def test_a_refusal_by_one_of_two_servers_ends_the_publication_at_once_and_frees_the_other_server(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with serve(first_receiver, second_receiver) as servers:
        servers[0].script(UPDATE, refuse(400, "unknown dtype"))
        seconds: list[float] = []
        with (
            pytest.raises(PublishError, match=rf"{servers[0].url}.*unknown dtype"),
            publishing(servers, large_tensors) as publisher,
        ):
            timed_publish(publisher, 5, seconds)
        assert seconds[0] < 15.0
        assert all("/continue_generation" not in server.paths() for server in servers)
    # The second receiver waits in the broadcast, or has failed in it, until the trainer's end closes the connection.


def test_a_receiver_that_is_killed_fails_the_publication() -> None:
    with start_receiver() as receiver, serve(receiver) as (server,):
        seconds: list[float] = []

        def publish_twice(publisher: WeightPublisher) -> None:
            for version in range(2):
                timed_publish(publisher, version, seconds)

        def tensors_of_a_server_that_dies_meanwhile() -> Named:
            if server.version == "0":
                receiver.kill()
            return large_tensors()

        with (
            pytest.raises(PublishError, match="was not published"),
            publishing([server], tensors_of_a_server_that_dies_meanwhile) as publisher,
        ):
            publish_twice(publisher)
        assert seconds[1] < 20.0
        assert server.paths().count("/continue_generation") == 1
        assert server.version == "unfinished 1"


def test_a_server_that_never_answers_fails_the_publication_at_its_timeout(first_receiver: Receiver) -> None:
    with serve(first_receiver) as (server,):
        server.script(UPDATE, hang)
        seconds: list[float] = []
        with (
            pytest.raises(PublishError, match=server.url),
            publishing([server], large_tensors, timeout_seconds=8.0) as publisher,
        ):
            timed_publish(publisher, 0, seconds)
        assert 7.0 < seconds[0] < 40.0


def test_a_group_that_is_never_complete_is_an_error_that_names_the_servers_within_the_timeout() -> None:
    with serve(None, None) as servers:
        servers[1].script("/init_weights_update_group", hang)
        start = time.monotonic()
        with (
            pytest.raises(PublishError, match=f"{servers[0].url}, {servers[1].url}"),
            publishing(servers, some_tensors, timeout_seconds=1.5) as publisher,
        ):
            publisher.publish(0)
        assert time.monotonic() - start < 25.0


def test_a_server_that_refuses_the_group_is_an_error_with_its_words_at_once() -> None:
    with serve(None) as (server,):
        server.script("/init_weights_update_group", refuse(400, "Failed to initialize custom process group"))
        start = time.monotonic()
        with (
            pytest.raises(PublishError, match=rf"{server.url}.*Failed to initialize"),
            publishing([server], some_tensors, timeout_seconds=20.0) as publisher,
        ):
            publisher.publish(0)
        assert time.monotonic() - start < 10.0


@pytest.mark.parametrize(
    "path",
    [
        "/pause_generation",
        "/begin_weight_update",
        "/update_weight_version",
        "/end_weight_update",
        "/weights_checker",
        "/continue_generation",
    ],
)
def test_a_step_that_a_server_refuses_is_a_publish_error_and_it_is_not_continued(
    path: str, first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with serve(first_receiver, second_receiver) as servers:
        servers[1].script(path, refuse(400, "not now"))
        with (
            pytest.raises(PublishError, match=rf"{servers[1].url}{path}.*not now"),
            publishing(servers, some_tensors) as publisher,
        ):
            publisher.publish(0)
        undone = ["/destroy_weights_update_group", "/end_weight_update"]
        assert servers[1].paths()[-3:] == [path, *undone]
        is_confirmed = path == "/continue_generation"
        assert ("/continue_generation" in servers[0].paths()) == is_confirmed


def test_an_answer_200_that_says_no_success_is_an_error(first_receiver: Receiver) -> None:
    with serve(first_receiver) as (server,):
        server.script(UPDATE, answer({"success": False, "message": "some names are unknown"}))
        with (
            pytest.raises(PublishError, match="some names are unknown"),
            publishing([server], some_tensors) as publisher,
        ):
            publisher.publish(0)
        assert "/continue_generation" not in server.paths()


def test_servers_whose_checksums_differ_are_an_error_that_names_server_and_tensor(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with serve(first_receiver, second_receiver) as servers:
        servers[0].checksums = {"a.weight": "11", "b.weight": "22", "c.weight": "33"}
        servers[1].checksums = {"a.weight": "11", "b.weight": "23", "c.weight": "33"}
        with (
            pytest.raises(PublishError, match=rf"version 4.*{servers[1].url}.*b\.weight") as failure,
            publishing(servers, some_tensors) as publisher,
        ):
            publisher.publish(4)
        assert "a.weight" not in str(failure.value)
        assert all("/continue_generation" not in server.paths() for server in servers)


def test_a_tensor_that_only_one_server_has_is_a_difference(first_receiver: Receiver, second_receiver: Receiver) -> None:
    with serve(first_receiver, second_receiver) as servers:
        servers[1].checksums = {**servers[0].checksums, "lm_head.weight": "aa"}
        with pytest.raises(PublishError, match=r"lm_head\.weight"), publishing(servers, some_tensors) as publisher:
            publisher.publish(0)


def test_where_the_servers_run_does_not_count_as_a_difference(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with serve(first_receiver, second_receiver) as servers:
        servers[1].parallelism = servers[0].parallelism | {"rank": 5, "size": 8, "dp_rank": 2}
        with publishing(servers, some_tensors) as publisher:
            publisher.publish(0)
        assert [server.version for server in servers] == ["0", "0"]


@pytest.mark.parametrize("content", [{"success": True, "message": "Success."}, "ok", {"ranks": [{}]}])
def test_an_answer_without_checksums_is_an_error(
    content: object, first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with serve(first_receiver, second_receiver) as servers:
        servers[1].script("/weights_checker", answer(content))
        with (
            pytest.raises(PublishError, match=rf"(?i){servers[1].url}.*checksum"),
            publishing(servers, some_tensors) as publisher,
        ):
            publisher.publish(0)


def test_a_host_that_cannot_be_resolved_is_a_publish_error() -> None:
    class Elsewhere:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

        urls = ("http://no-such-host.invalid:1",)
        group_world_size, membership = 2, 0

        def recover(self, version: int) -> str:
            return "failed"

    with pytest.raises(PublishError, match=r"no-such-host\.invalid"):
        make_publisher(OneRank(some_tensors, 1000), Elsewhere(), 5.0).publish(0)  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", ["update", "group"])
def test_a_trainer_whose_publication_failed_ends_at_once(broken: str) -> None:
    """Its threads inside the broadcast or the rendezvous must not keep it until their timeouts; it ends as the command
    does, since the interpreter's own end may fail while they are there."""
    program = textwrap.dedent("""
        import sys
        import torch.distributed as dist
        from megatron_a3po.errors import PublishError
        from megatron_a3po.runtime.processes import end_process
        from tests.unit.weights.test_publisher import OneRank, fleet_of, large_tensors, make_publisher

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with fleet_of(sys.argv[1]) as fleet:
                with make_publisher(OneRank(large_tensors, 1 << 20), fleet, 60.0) as publisher:
                    publisher.publish(0)
        except PublishError as error:
            print(error, file=sys.stderr)
            end_process(3)
    """)
    with ExitStack() as stack:
        receiver = stack.enter_context(start_receiver())
        (server,) = stack.enter_context(serve(receiver))
        path = UPDATE if broken == "update" else "/init_weights_update_group"
        server.script(path, refuse(400, "it is broken"))

        result = subprocess.run(
            [sys.executable, "-c", program, server.url],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=30.0,
        )

    assert result.returncode == 3, result.stderr
    assert "it is broken" in result.stderr

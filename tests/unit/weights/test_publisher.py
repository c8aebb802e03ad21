"""Weights on the wire to scripted servers, whose receivers are real ranks of a gloo group in processes of their own."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from aiohttp import web

from megatron_a3po.errors import PublishError
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.runtime.processes import end_process
from megatron_a3po.weights.publisher import WeightPublisher
from megatron_a3po.weights.wait_times import WaitTimes
from tests.support.deadlines import scaled
from tests.support.publishing import (
    UPDATE,
    Named,
    OneRank,
    as_bytes,
    fleet_of,
    large_tensors,
    make_publisher,
    publishing,
    serve,
    some_tensors,
)
from tests.support.receiver import FORKED, Json, Receiver, start_receiver
from tests.support.scripted_server import Action, answer, refuse

pytestmark = pytest.mark.usefixtures("default_group")

JOIN = "/init_weights_update_group"
SHORT = WaitTimes(late_server_seconds=0.1)


def timed_publish(publisher: WeightPublisher, version: int, seconds: list[float]) -> None:
    """Publish and append how long it took, also when it fails."""
    start = time.monotonic()
    try:
        publisher.publish(version)
    finally:
        seconds.append(time.monotonic() - start)


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
        assert seconds[0] < scaled(15.0)
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
        assert seconds[0] < scaled(15.0)
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
        assert seconds[1] < scaled(20.0)
        assert server.paths().count("/continue_generation") == 1
        assert server.version == "unfinished 1"


def silent_until_given_up(fleet: Fleet) -> Action:
    """Give no answer before the publication has failed without it."""

    async def action(_: web.Request, __: Json) -> web.StreamResponse:
        while not fleet.pool.has_failed:
            await asyncio.sleep(0.01)
        return web.Response(status=500)

    return action


@pytest.mark.parametrize("path", [JOIN, UPDATE])
def test_a_server_that_never_answers_fails_the_publication_at_its_timeout(
    path: str, first_receiver: Receiver, second_receiver: Receiver
) -> None:
    source = OneRank(large_tensors, 1 << 20)
    with serve(first_receiver, second_receiver) as servers, fleet_of(*(server.url for server in servers)) as fleet:
        publisher = make_publisher(source, fleet, 20.0, times=SHORT)
        publisher.publish(0)
        if path == JOIN:  # the group is built again when others take part than before
            fleet.pool.membership.revision += 1
        publisher._transport._timeout_seconds = 1.5  # type: ignore[attr-defined]
        servers[1].script(path, silent_until_given_up(fleet))
        start = time.monotonic()
        with pytest.raises(PublishError, match=f"{servers[0].url}, {servers[1].url}.*1.5 s"):
            publisher.publish(1)
        assert time.monotonic() - start > 1.5


def test_a_server_that_refuses_the_group_is_an_error_with_its_words_at_once() -> None:
    with serve(None) as (server,):
        server.script(JOIN, refuse(400, "Failed to initialize custom process group"))
        seconds: list[float] = []
        with (
            pytest.raises(PublishError, match=rf"{server.url}.*Failed to initialize"),
            publishing([server], some_tensors, timeout_seconds=scaled(40.0), times=SHORT) as publisher,
        ):
            timed_publish(publisher, 0, seconds)
        assert seconds[0] < scaled(10.0)


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


def fail_to_publish(url: str, report: Path) -> None:
    """End as the command does: the interpreter's own end may fail while threads are inside of torch."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        source = OneRank(large_tensors, 1 << 20)
        with fleet_of(url) as fleet, make_publisher(source, fleet, 600.0, times=SHORT) as publisher:
            publisher.publish(0)
    except PublishError as error:
        report.write_text(str(error))
        end_process(3)


@pytest.mark.parametrize("path", [UPDATE, JOIN])
def test_a_trainer_whose_publication_failed_ends_at_once(path: str, first_receiver: Receiver, tmp_path: Path) -> None:
    """Its threads inside of the broadcast or the rendezvous do not keep it until their timeouts."""
    with serve(first_receiver) as (server,):
        server.script(path, refuse(400, "it is broken"))
        process = FORKED.Process(target=fail_to_publish, args=(server.url, tmp_path / "report"))
        process.start()
        process.join(scaled(60.0))
        try:
            assert process.exitcode == 3
        finally:
            process.kill()
    assert "it is broken" in (tmp_path / "report").read_text()

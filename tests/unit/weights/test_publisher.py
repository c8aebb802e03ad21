"""Weights on the wire to scripted servers, whose receivers are real ranks of a gloo group in processes of their own."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from aiohttp import web

from megatron_a3po.errors import PublishError
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.runtime.processes import end_process
from tests.support.deadlines import scaled
from tests.support.publishing import (
    CONTINUE,
    JOIN,
    LEAVE,
    SHORT,
    UPDATE,
    Named,
    OneRank,
    as_bytes,
    fleet_of,
    large_tensors,
    make_publisher,
    running,
    serve,
    some_tensors,
)
from tests.support.receiver import FORKED, Json, Receiver, start_receiver
from tests.support.scripted_server import Action, refuse

pytestmark = pytest.mark.usefixtures("default_group")

BEGIN, LABEL, END, CHECK = "/begin_weight_update", "/update_weight_version", "/end_weight_update", "/weights_checker"


def test_every_server_receives_the_tensors_bytes_in_order_and_the_version_with_the_last_bucket(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    tensors = some_tensors()
    with running(first_receiver, second_receiver, tensors=lambda: tensors, bucket_bytes=190) as run:
        run.publish(3)
        paths = run.servers[0].paths()
    joined = [server.bodies(JOIN)[0] for server in run.servers]
    requests, same = (server.bodies(UPDATE) for server in run.servers)
    assert requests == same
    ordered = [tensors[number] for number in (0, 3, 1, 2, 4)]  # in a bucket, those of larger items come first
    assert [len(request["names"]) for request in requests] == [4, 1]
    assert [name for request in requests for name in request["names"]] == [name for name, _ in ordered]
    assert [shape for request in requests for shape in request["shapes"]] == [list(t.shape) for _, t in ordered]
    dtypes = [dtype for request in requests for dtype in request["dtypes"]]
    assert dtypes == ["float32", "float32", "bfloat16", "bfloat16", "float32"]
    assert [request["flush_cache"] for request in requests] == [False, True]
    assert [request.get("weight_version") for request in requests] == [None, "3"]
    assert {request["load_format"] for request in requests} == {"flattened_bucket"}
    assert [server.version for server in run.servers] == ["3", "3"]
    for receiver in (first_receiver, second_receiver):
        assert b"".join(receiver.buffers) == b"".join(as_bytes(tensor) for _, tensor in ordered)
    pause = "/pause_generation"
    assert paths == [LEAVE, JOIN, pause, BEGIN, LABEL, UPDATE, UPDATE, END, CHECK, CONTINUE]

    # Ranks of the group follow the servers, and its end leaves no group behind.
    assert [(body["rank_offset"], body["world_size"]) for body in joined] == [(1, 3), (2, 3)]
    assert joined[0]["master_address"] == "127.0.0.1" and joined[0]["backend"] == "gloo"
    name = joined[0]["group_name"]
    # Before it is built, a run that died may have left one there.
    assert [server.bodies(LEAVE) for server in run.servers] == [[{"group_name": name}] * 2] * 2
    assert name not in dist.distributed_c10d._world.pg_names.values()


def test_a_refusal_during_the_broadcast_ends_it_at_once_and_nothing_is_resumed(first_receiver: Receiver) -> None:
    with running(first_receiver, tensors=large_tensors, bucket_bytes=1 << 20) as run:
        (server,) = run.servers
        server.script(UPDATE, refuse(400, "partially updated: size mismatch"), calls=range(2, 3))
        with pytest.raises(PublishError, match=rf"layers\.0\.norm.*{server.url}.*400.*size mismatch"):
            run.publish(5)
        assert run.seconds < scaled(15.0)
    assert server.paths()[-3:] == [UPDATE, LEAVE, END] and server.version == "unfinished 5"


def test_a_refusal_by_one_of_two_servers_ends_the_publication_at_once_and_frees_the_other_server(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    """It waits in the broadcast, or has failed in it, until the trainer's end closes the connection."""
    with running(first_receiver, second_receiver, tensors=large_tensors, bucket_bytes=1 << 20) as run:
        first = run.servers[0]
        first.script(UPDATE, refuse(400, "unknown dtype"))
        with pytest.raises(PublishError, match=f"{first.url}.*unknown dtype"):
            run.publish(5)
        assert run.seconds < scaled(15.0)
    assert all(CONTINUE not in server.paths() for server in run.servers)


def test_a_receiver_that_is_killed_fails_the_publication() -> None:
    def tensors_of_a_server_that_dies_meanwhile() -> Named:
        if dies:
            receiver.kill()
        return large_tensors()

    dies = False
    with (
        start_receiver() as receiver,
        running(receiver, tensors=tensors_of_a_server_that_dies_meanwhile, bucket_bytes=1 << 20) as run,
    ):
        run.publish(0)
        dies = True
        with pytest.raises(PublishError, match="version 1"):
            run.publish(1)
        assert run.seconds < scaled(20.0)
        (server,) = run.servers
        assert server.paths().count(CONTINUE) == 1 and server.version == "unfinished 1"


def silent_until_given_up(fleet: Fleet) -> Action:
    """Give no answer before the publication has failed without it."""

    async def action(_: web.Request, __: Json) -> web.StreamResponse:
        while not fleet.pool.publication_has_failed:
            await asyncio.sleep(0.01)
        return web.Response(status=500)

    return action


@pytest.mark.parametrize("path", [JOIN, UPDATE])
def test_a_server_that_never_answers_fails_the_publication_at_its_timeout(
    path: str, first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with running(first_receiver, second_receiver, tensors=large_tensors, bucket_bytes=1 << 20) as run:
        first, second = run.servers
        run.publish(0)
        if path == JOIN:  # the group is built again when others take part than before
            run.fleet.pool.membership.revision += 1
        run.publisher._transport._timeout_seconds = 1.0  # type: ignore[attr-defined]
        second.script(path, silent_until_given_up(run.fleet))
        with pytest.raises(PublishError, match=f"{first.url}, {second.url}.*1 s"):
            run.publish(1)
        assert run.seconds > 1.0


@pytest.mark.parametrize("path", ["/pause_generation", BEGIN, LABEL, END, CHECK, CONTINUE])
def test_a_step_that_a_server_refuses_is_a_publish_error_and_it_is_not_continued(
    path: str, first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with running(first_receiver, second_receiver) as run:
        first, second = run.servers
        second.script(path, refuse(400, "not now"))
        with pytest.raises(PublishError, match=f"{second.url}{path}.*not now"):
            run.publish(0)
    assert second.paths()[-3:] == [path, LEAVE, END]
    assert (CONTINUE in first.paths()) == (path == CONTINUE), "it is confirmed"


def test_servers_whose_checksums_differ_are_an_error_that_names_server_and_tensor(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with running(first_receiver, second_receiver) as run:
        first, second = run.servers
        first.checksums = {"a.weight": "11", "b.weight": "22", "c.weight": "33"}
        second.checksums = first.checksums | {"b.weight": "23"}
        with pytest.raises(PublishError, match=rf"version 4.*{second.url}.*b\.weight") as failure:
            run.publish(4)
        assert "a.weight" not in str(failure.value)
        assert all(CONTINUE not in server.paths() for server in run.servers)


def test_a_host_that_cannot_be_resolved_is_a_publish_error() -> None:
    class Elsewhere:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

        urls = ("http://no-such-host.invalid:1",)
        group_world_size, revision = 2, 0

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

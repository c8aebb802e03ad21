"""Servers that fail while weights are published to them: who is left out, who goes on, and how they come back."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from aiohttp import web

from megatron_a3po.errors import PublishError
from tests.support.deadlines import scaled
from tests.support.publishing import CONTINUE, JOIN, LEAVE, SHORT, UPDATE, Run, large_tensors, running
from tests.support.receiver import Json, Receiver, start_receiver
from tests.support.scripted_server import (
    FAST,
    Action,
    ScriptedServer,
    after,
    answer,
    close_connection,
    hang,
    refuse,
    refuse_to_flush,
    success,
)

pytestmark = pytest.mark.usefixtures("default_group")

QUICK = replace(FAST, grace_seconds=scaled(0.5))


@pytest.fixture
def run(first_receiver: Receiver, second_receiver: Receiver) -> Iterator[Run]:
    """Return a run whose two servers hold version 0, of which one is enough."""
    times = replace(SHORT, late_server_seconds=scaled(0.6))
    with running(first_receiver, second_receiver, min_servers=1, times=times) as run:
        run.publish(0)
        yield run


FAULTS: dict[str, tuple[str, Action]] = {
    "refuses the group": (JOIN, refuse(400, "no such group")),
    "refuses the pause": ("/pause_generation", refuse(500, "no such mode")),
    "refuses the label": ("/update_weight_version", refuse(400, "no such label")),
    "refuses to begin": ("/begin_weight_update", refuse(400, "a session is open")),
    "refuses before the broadcast": (UPDATE, refuse(400, "unknown dtype")),
    "dies in the update": (UPDATE, close_connection),
    "answers that it failed": (UPDATE, answer({"success": False, "message": "unknown name"})),
    "refuses the end": ("/end_weight_update", refuse(500, "out of memory")),
    "dies at the end": ("/end_weight_update", close_connection),
    "cannot flush": ("/flush_cache", refuse(400, "Flush cache failed.")),
    "has no checksums": ("/weights_checker", refuse(400, "disabled")),
    "tells of no version": ("/model_info", refuse(500, "busy")),
    "has another version": ("/model_info", answer({"weight_version": "7"})),
    "does not continue": (CONTINUE, refuse(500, "no such mode")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_is_left_out_and_the_next_publication_takes_it_back(
    fault: str, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    path, action = FAULTS[fault]
    first, second = run.servers
    if path == JOIN:  # groups are built when others take part than before
        run.fleet.pool.membership.revision += 1
    continued = second.paths().count(CONTINUE)
    second.script(path, action)
    if path == "/flush_cache":  # it is called when an update did not bring it about
        refuse_to_flush(second, UPDATE)
    metrics = run.publish(1)
    assert run.quarantined == [second.url] and second.url in caplog.text
    assert (metrics["servers_healthy"], metrics["servers_quarantined"], metrics["server_resyncs"]) == (1, 1, 0)
    assert first.version == "1"
    assert run.sampled() == ({first.url}, {1})
    assert second.paths().count(CONTINUE) == continued + (path == CONTINUE), "it was not continued"

    second.script(path, action, range(0))
    second.script(UPDATE, action, range(0))
    second.startup_time += 1.0
    metrics = run.publish(2)
    assert (metrics["servers_healthy"], metrics["servers_quarantined"], metrics["server_resyncs"]) == (2, 0, 1)
    assert first.version == second.version == "2"
    assert run.sampled() == ({first.url, second.url}, {2})
    last = {server.receiver.buffers[-1] for server in run.servers if server.receiver is not None}
    assert len(last) == 1, "each received everything of the last version"


def test_a_server_that_comes_late_to_a_group_that_another_one_has_refused_goes_on(run: Run) -> None:
    first, second = run.servers

    async def join(_: web.Request, body: Json) -> web.StreamResponse:
        await first._receive("join", body)
        return success()

    first.script(JOIN, after(0.2, join), range(2, 3))
    second.script(JOIN, refuse(400, "no such group"))
    run.fleet.pool.membership.revision += 1
    run.publish(1)
    assert first.version == "1" and run.quarantined == [second.url]


def test_a_silent_server_is_left_out_within_the_timeout(first_receiver: Receiver, second_receiver: Receiver) -> None:
    times = {"timeout_seconds": scaled(1.5), "timings": QUICK}
    with running(first_receiver, second_receiver, tensors=large_tensors, min_servers=1, **times) as run:
        run.publish(0)
        run.servers[1].script(UPDATE, hang)
        run.publish(1)
        assert run.quarantined == [run.servers[1].url]
        assert run.sampled() == ({run.servers[0].url}, {1})


def test_a_400_after_the_weights_have_changed_leaves_the_server_out_though_it_says_the_new_version(run: Run) -> None:
    second = run.servers[1]

    async def change_and_refuse(_: web.Request, body: Json) -> web.StreamResponse:
        await second._update_weights_from_distributed(body)
        status = 400 if "weight_version" in body else 200
        return web.json_response({"success": status == 200, "message": "out of memory"}, status=status)

    second.script(UPDATE, change_and_refuse)
    run.publish(1)
    assert second.version == "1" and run.quarantined == [second.url]
    assert run.sampled() == ({run.servers[0].url}, {1})


def test_a_refusal_of_the_first_of_many_buckets_ends_the_attempt_for_all_of_them(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    tensors = [(f"t{number}", torch.full((4,), float(number))) for number in range(12)]
    with running(
        first_receiver, second_receiver, tensors=lambda: tensors, bucket_bytes=16, timeout_seconds=3.0, min_servers=1
    ) as run:
        run.publish(0)
        run.servers[1].script(UPDATE, refuse(400, "unknown dtype"))
        assert run.publish(1)["servers_quarantined"] == 1
        assert run.servers[0].version == "1" and len(first_receiver.buffers) >= 24


def test_a_server_flushes_with_the_last_bucket_and_is_asked_again_only_where_it_could_not(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with running(first_receiver, second_receiver) as run:
        first, second = run.servers
        refuse_to_flush(second, UPDATE)
        second.script("/flush_cache", refuse(400, "Flush cache failed."), calls=range(1, 6))
        run.publish(0)
        for server in run.servers:
            *others, last = server.bodies(UPDATE)
            assert last["flush_cache"] and not any(body["flush_cache"] for body in others) and others
        assert "/flush_cache" not in first.paths()
        assert run.quarantined == [] and first.version == second.version == "0"
        asked = second.paths()
        assert asked.count("/flush_cache") == 6
        labels = [[body["new_version"] for body in server.bodies("/update_weight_version")] for server in run.servers]
        assert labels == [["unfinished 0"], ["unfinished 0", "0"]]
        # Its version is told when nothing of the old one is left, and before anything is sampled.
        assert asked[-1] == CONTINUE
        assert asked[asked.index("/flush_cache") :].index("/update_weight_version") == 6


def test_a_server_that_cannot_be_flushed_in_six_attempts_fails(first_receiver: Receiver) -> None:
    with running(first_receiver) as run:
        run.publish(0)
        (server,) = run.servers
        refuse_to_flush(server, UPDATE)
        server.script("/flush_cache", refuse(400, "Flush cache failed."))
        with pytest.raises(PublishError, match="Flush cache failed"):
            run.publish(1)
        assert server.paths().count("/flush_cache") == 6
        assert server.paths().count(CONTINUE) == 1 and server.version == "unfinished 1"


def test_a_server_that_reads_files_flushes_with_them_or_is_asked_again() -> None:
    with running(None) as run:
        (server,) = run.servers
        run.fleet.update_from_disk("folder", "1", 5.0)
        run.fleet.flush()
        assert server.version == "1" and "/flush_cache" not in server.paths()
        refuse_to_flush(server, "/update_weights_from_disk")
        run.fleet.update_from_disk("folder", "2", 5.0)
        run.fleet.flush()
        assert server.version == "2" and server.paths().count("/flush_cache") == 1
        assert run.quarantined == [] and server.bodies("/update_weights_from_disk")[-1]["flush_cache"]


def test_of_three_servers_the_one_with_other_weights_is_left_out(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with start_receiver() as third, running(first_receiver, second_receiver, third, min_servers=1) as run:
        run.servers[1].checksums = {"model.norm.weight": "0bad"}
        run.publish(0)
        assert run.quarantined == [run.servers[1].url]


def test_a_receiver_that_is_killed_in_a_broadcast_costs_its_server_only(first_receiver: Receiver) -> None:
    with (
        start_receiver() as mortal,
        running(first_receiver, mortal, tensors=large_tensors, timeout_seconds=6.0, min_servers=1) as run,
    ):

        async def die(*_: object) -> web.StreamResponse:
            mortal.kill()
            raise ConnectionResetError("the scheduler was killed")

        run.publish(0)
        run.servers[1].script(UPDATE, die)
        run.publish(1)
        run.publish(2)
        assert run.quarantined == [run.servers[1].url]
        assert run.sampled() == ({run.servers[0].url}, {2})


def test_with_too_few_servers_the_publication_is_an_error_that_names_them_all(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with running(first_receiver, second_receiver, timeout_seconds=3.0, min_servers=1) as run:
        first, second = run.servers
        first.script("/begin_weight_update", refuse(400, "a session is open"))
        second.script(UPDATE, refuse(400, "unknown dtype"))
        with pytest.raises(PublishError, match=f"{first.url}.*session is open.*{second.url}.*unknown dtype"):
            run.publish(0)
    assert all(CONTINUE not in server.paths() for server in run.servers)


def test_after_a_failed_publication_only_servers_that_hold_a_whole_version_are_continued(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with running(first_receiver, second_receiver, timeout_seconds=3.0) as run:
        first, second = run.servers
        run.publish(0)
        second.script("/begin_weight_update", refuse(400, "a session is open"))
        with pytest.raises(PublishError, match="a session is open"):
            run.publish(1)
        # The first still holds all of version 0; of the second, nothing is known.
        assert [server.paths().count(CONTINUE) for server in run.servers] == [2, 1]
        assert first.paths()[-2:] == ["/end_weight_update", CONTINUE]
        assert [server.version for server in run.servers] == ["0", "0"]


def left_groups(server: ScriptedServer) -> list[str]:
    return [body["group_name"] for body in server.bodies(LEAVE)]


def test_however_often_others_take_part_a_server_that_comes_back_leaves_only_what_it_may_be_in() -> None:
    with running(None, None, min_servers=1) as run:
        fleet, second = run.fleet, run.servers[1]
        for number in range(50):
            fleet.create_group(f"group {number}", "127.0.0.1", 29500, "gloo", 5.0).result(10.0)
            fleet.reject({second.url: "it holds other weights"})
            before = len(left_groups(second))
            fleet.settle_members(call_back="all")
            assert left_groups(second)[before:] == [f"group {number}"] and run.quarantined == []
            fleet.leave_stale_group(f"group {number}")
        assert [server.control.groups for server in fleet.pool.membership.servers] == [[], []]
        fleet.create_group("the last", "127.0.0.1", 29500, "gloo", 5.0).result(10.0)
        fleet.destroy_group("the last").result(10.0)
        assert [server.control.groups for server in fleet.pool.membership.servers] == [[], []]


def test_a_server_that_was_too_stuck_to_leave_its_group_leaves_it_when_it_comes_back() -> None:
    with running(None, None, min_servers=1, timings=QUICK) as run:
        fleet, (first, second) = run.fleet, run.servers
        fleet.settle_members(call_back="none")
        fleet.create_group("group", "127.0.0.1", 29500, "gloo", 5.0).result(10.0)
        second.script(LEAVE, hang)
        fleet.mark_failed()
        assert fleet.recover(0) == "again"
        assert run.quarantined == [second.url] and left_groups(first) == ["group"]

        fleet.settle_members(call_back="all")
        assert run.quarantined == [second.url]
        second.script(LEAVE, refuse(400, "The group to be destroyed does not exist."))
        fleet.settle_members(call_back="all")
        assert run.quarantined == [] and left_groups(second) == ["group"] * 3
        # Whoever answers that there is no such group is not told again.
        fleet.reject({second.url: "it holds other weights"})
        fleet.settle_members(call_back="all")
        assert run.quarantined == [] and left_groups(second) == ["group"] * 3

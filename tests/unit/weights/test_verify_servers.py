"""What servers hold, by their checksums; and servers of several ranks, with their places in an update group."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_a3po.errors import PublishError, RolloutError
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.weights.verify_servers import check_servers
from tests.support.publishing import fleet_of, serve
from tests.support.scripted_server import ScriptedServer, answer

Ranks = list[dict[str, str]]
FIRST, SECOND = {"norm.weight": "00", "qkv_proj.weight": "aa"}, {"norm.weight": "00", "qkv_proj.weight": "bb"}


@contextmanager
def servers_of(*ranks: Ranks) -> Iterator[tuple[list[ScriptedServer], Fleet]]:
    """One server for each list of checksums, with as many tensor-parallel ranks, at a place of its own."""
    with serve(*[None] * len(ranks)) as servers:
        for number, (server, checksums) in enumerate(zip(servers, ranks, strict=True)):
            place = {"parallelism_info": {"rank": number, "dp_rank": number}}
            answered = [{"checksums": rank, "per_gpu_checksum": "1"} | place for rank in checksums]
            server.version = "3"
            server.script("/server_info", answer({"tp_size": len(checksums), "enable_priority_scheduling": True}))
            server.script("/weights_checker", answer({"success": True, "message": "", "ranks": answered}))
        with fleet_of(*(server.url for server in servers)) as fleet:
            yield servers, fleet


def test_every_rank_of_every_server_has_a_place_of_its_own_in_the_group() -> None:
    with servers_of([FIRST, SECOND], [FIRST], [FIRST, SECOND, SECOND]) as (servers, fleet):
        fleet.create_group("weights", "127.0.0.1", 29500, "gloo", 5.0).result(10.0)

        bodies = [server.bodies("/init_weights_update_group") for server in servers]
        assert fleet.group_world_size == 7
        assert [(body["rank_offset"], body["world_size"]) for (body,) in bodies] == [(1, 7), (3, 7), (4, 7)]


@pytest.mark.parametrize(
    "second",
    [[FIRST, SECOND], [{"norm.weight": "00", "qkv_proj.weight": "whole"}]],  # other shards are not compared
    ids=json.dumps,
)
def test_servers_whose_ranks_hold_the_same_pass_wherever_they_run(second: Ranks) -> None:
    with servers_of([FIRST, SECOND], second) as (_, fleet):
        check_servers(fleet, 3)


@pytest.mark.parametrize(
    "second", [[FIRST, FIRST], [SECOND, FIRST], [FIRST, SECOND | {"norm.weight": "01"}]], ids=json.dumps
)
def test_servers_whose_ranks_differ_are_refused(second: Ranks) -> None:
    with servers_of([FIRST, SECOND], second) as (servers, fleet), pytest.raises(PublishError, match=servers[1].url):
        check_servers(fleet, 3)


def test_of_three_servers_the_one_with_a_wrong_rank_is_at_fault() -> None:
    with servers_of([FIRST, SECOND], [FIRST, FIRST], [FIRST, SECOND]) as (servers, fleet):
        with pytest.raises(PublishError, match=r"such as qkv_proj\.weight") as raised:
            check_servers(fleet, 3)
        assert str(raised.value).startswith(f"version 3: {servers[1].url} and ")
        assert f"{servers[2].url} and" not in str(raised.value)


def test_a_tensor_that_only_one_server_has_is_a_difference() -> None:
    with servers_of([FIRST], [FIRST | {"lm_head.weight": "aa"}]) as (_, fleet):
        with pytest.raises(PublishError, match=r"lm_head\.weight") as raised:
            check_servers(fleet, 3)
        assert "norm.weight" not in str(raised.value)


@pytest.mark.parametrize("content", [{"success": True, "message": "Success."}, "ok", {"ranks": [{}]}])
def test_an_answer_without_checksums_is_an_error_that_names_the_server(content: object) -> None:
    with servers_of([FIRST], [FIRST]) as (servers, fleet):
        servers[1].script("/weights_checker", answer(content))
        with pytest.raises(RolloutError, match=rf"(?i){servers[1].url}.*checksum"):
            check_servers(fleet, 3)

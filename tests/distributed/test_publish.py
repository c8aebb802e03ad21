"""Publication from several ranks to scripted servers, whose fleet are real ranks of the update groups."""

import dataclasses
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.distributed.launch import end_model_parallel, run_ranks
from tests.distributed.publish_cases import PUBLISHED, Case, change, changed_policy, encoded, expected_bytes
from tests.support.deadlines import scaled
from tests.support.publishing import UPDATE, serve
from tests.support.receiver import Json, start_receiver
from tests.support.scripted_server import ScriptedServer, close_connection, refuse, success
from tests.support.tiny_models import save_tiny_model

BUCKET_BYTES = 100_000


@pytest.mark.distributed
def test_two_servers_receive_the_models_tensors_from_every_layout(tmp_path: Path) -> None:
    for family in {case.family for case in PUBLISHED}:
        save_tiny_model(family, tmp_path / family)
    with start_receiver() as first, start_receiver() as second, serve(first, second) as servers:
        urls = json.dumps([server.url for server in servers])
        output = run_ranks(_publish, 4, json.dumps(encoded(PUBLISHED)), str(tmp_path), urls, timeout_seconds=200.0)
        received = [
            _received(server.bodies(UPDATE), receiver.buffers)
            for server, receiver in zip(servers, (first, second), strict=True)
        ]

    reports = [json.loads(line) for line in output.splitlines() if line.startswith('{"title"')]
    assert [report["title"] for report in reports] == [case.title for case in PUBLISHED]
    for publications in received:
        assert [publication["version"] for publication in publications] == ["0", "1"] * len(PUBLISHED)
        for number, publication in enumerate(publications):
            case = PUBLISHED[number // 2]
            precision = case.settings.get("precision", "fp32")
            expected = expected_bytes(tmp_path / case.family, times=1 + number % 2, precision=precision)
            assert publication["tensors"].keys() == expected.keys(), case.title
            wrong = [name for name, content in publication["tensors"].items() if content != expected[name]]
            assert wrong == [], case.title
            assert len(publication["groups"]) == case.parallel.get("pipeline", 1), case.title
            minimum = sum(map(len, expected.values()))
            assert publication["bytes"] <= 1.02 * minimum
            largest_part = max(map(len, expected.values()))
            assert max(publication["sizes"]) <= max(BUCKET_BYTES, 8 * largest_part)


def _received(requests: list[Json], buffers: list[bytes]) -> list[dict[str, Any]]:
    """Publication by publication; a name that comes twice in one is an error."""
    publications: list[dict[str, Any]] = []
    tensors: dict[str, bytes] = {}
    groups: set[str] = set()
    sizes: list[int] = []
    for request, buffer in zip(requests, buffers, strict=True):
        start = 0
        for name, dtype, shape in zip(request["names"], request["dtypes"], request["shapes"], strict=True):
            assert name not in tensors
            size = math.prod(shape) * {"float32": 4, "bfloat16": 2}[dtype]
            tensors[name] = buffer[start : start + size]
            start += size
        assert start == len(buffer)
        groups.add(request["group_name"])
        sizes.append(len(buffer))
        if "weight_version" in request:
            assert request["flush_cache"]
            publications.append(
                {
                    "version": request["weight_version"],
                    "tensors": tensors,
                    "groups": groups,
                    "sizes": sizes,
                    "bytes": sum(sizes),
                }
            )
            tensors, groups, sizes = {}, set(), []
    return publications


@pytest.mark.distributed
def test_every_rank_is_told_of_a_refused_bucket_and_of_a_rank_that_lacks_a_parameter(tmp_path: Path) -> None:
    save_tiny_model("qwen3", tmp_path / "qwen3")
    with start_receiver() as first, start_receiver() as second, serve(first, second) as servers:
        servers[1].script(UPDATE, refuse(400, "partially updated"), calls=range(4, 5))
        urls = json.dumps([server.url for server in servers])
        output = run_ranks(_fail, 4, str(tmp_path), urls, timeout_seconds=200.0)

    lacking, refused = (json.loads(line) for line in output.splitlines() if line.startswith('["'))
    assert len(set(lacking)) == 1 and len(lacking) == 4
    assert "rank 3" in lacking[0] and "decoder.layers.3.mlp.linear_fc2.weight" in lacking[0]
    assert len(set(refused)) == 1 and len(refused) == 4
    assert "version 0 was not published" in refused[0] and "partially updated" in refused[0]
    assert servers[1].url in refused[0] and "bucket model." in refused[0]
    assert all("/continue_generation" not in server.paths() for server in servers)


@pytest.mark.distributed
def test_a_server_that_fails_drops_out_on_every_rank_and_holds_the_others_bytes_when_it_is_back(tmp_path: Path) -> None:
    """It refuses a bucket of version 0. Before versions 3 and 6, the other server was in quarantine, so that all
    groups are built anew; the server fails when it should forget the former ones. In between it takes part twice, and
    answers: it would be asked ever more rarely otherwise."""
    save_tiny_model("qwen3", tmp_path / "qwen3")
    with start_receiver() as first, start_receiver() as second, serve(first, second) as servers:
        faults = {"2": refuse(500, "out of memory"), "5": close_connection}

        async def fail_once_to_forget(request: web.Request, body: Json) -> web.StreamResponse:
            if (fault := faults.pop(servers[1].version, None)) is not None:
                return await fault(request, body)
            await servers[1]._receive("leave", body)
            return success()

        servers[1].script(UPDATE, refuse(400, "partially updated"), calls=range(4, 5))
        servers[1].script("/destroy_weights_update_group", fail_once_to_forget)
        urls = json.dumps([server.url for server in servers])
        output = run_ranks(_lose_and_regain, 4, str(tmp_path), urls, timeout_seconds=200.0)
        received = [
            _received(requests, receiver.buffers[-len(requests) :])
            for receiver, requests in ((first, _bodies_of_others(servers[0])), (second, _bodies_of_others(servers[1])))
        ]

    assert faults == {}
    outcomes = [json.loads(line) for line in output.splitlines() if line.startswith('["')]
    assert outcomes == [["published"] * 4] * 8
    versions = [[int(publication["version"]) for publication in publications] for publications in received]
    assert versions == [list(range(8)), [1, 2, 4, 5, 7]]
    expected = [expected_bytes(tmp_path / "qwen3", times=1 + version) for version in range(8)]
    for publication in (*received[0], *received[1]):
        assert publication["tensors"] == expected[int(publication["version"])]


def _bodies_of_others(server: ScriptedServer) -> list[Json]:
    """Of all updates but the server's first one, which came to nothing."""
    paths = [path for path, _ in server.calls]
    begin = "/begin_weight_update"
    second = paths.index(begin, paths.index(begin) + 1)
    return [body for path, body in server.calls[second:] if path == UPDATE]


def _publish(cases: str, folder: str, urls: str) -> None:
    import torch.distributed as dist

    from tests.support.publishing import fleet_of

    _start()
    for case in [Case(**fields) for fields in json.loads(cases)]:
        model = changed_policy(case, Path(folder) / case.family)
        with fleet_of(*json.loads(urls)) as fleet:
            config = _configuration(case, folder)
            with _publisher(config, model, fleet) as publisher:
                for version in range(2):
                    publisher.publish(version)
                    change(model)
        if dist.get_rank() == 0:
            print(json.dumps({"title": case.title}), flush=True)
        end_model_parallel()
    dist.destroy_process_group()


def _fail(folder: str, urls: str) -> None:
    import torch.distributed as dist

    from megatron_a3po.runtime.processes import end_process
    from tests.support.publishing import fleet_of

    _start()
    case = Case(family="qwen3", parallel={"tensor": 2, "pipeline": 2})
    config = _configuration(case, folder)
    model = changed_policy(case, Path(folder) / case.family)
    last_layer = model.chunks[0].module.decoder.layers[1].mlp.linear_fc2
    weight = last_layer.weight
    if dist.get_rank() == 3:
        last_layer.weight = None
    _print_errors(lambda: _publisher(config, model, None))
    last_layer.weight = weight
    with fleet_of(*json.loads(urls)) as fleet:

        def publish() -> None:
            with _publisher(config, model, fleet) as publisher:
                publisher.publish(0)

        _print_errors(publish)
    end_process(0)  # a broadcast that nobody joins any more is left behind


def _lose_and_regain(folder: str, urls: str) -> None:
    import torch.distributed as dist

    from megatron_a3po.runtime.processes import end_process
    from tests.support.publishing import fleet_of

    _start()
    case = Case(family="qwen3", parallel={"tensor": 2, "pipeline": 2})
    model = changed_policy(case, Path(folder) / case.family)
    first, second = json.loads(urls)
    with (
        fleet_of(first, second, min_servers=1) as fleet,
        _publisher(_configuration(case, folder), model, fleet) as publisher,
    ):
        for version in range(8):
            if version in (3, 6) and dist.get_rank() == 0:
                fleet.reject({first: "a response was lost"})
            _print_errors(partial(publisher.publish, version), "published")
            for server in fleet.pool.membership.members:
                if server.is_routable:  # on rank 0, which publishes
                    fleet.pool.membership.accept(server)
            change(model)
    end_process(0)  # a broadcast that nobody joins any more is left behind


def _start() -> None:
    import torch

    from megatron_a3po import cpu
    from megatron_a3po.parallel.layout import RankInfo, init_distributed

    cpu.install()
    torch.set_num_threads(1)
    init_distributed(RankInfo.from_environment(), "cpu", scaled(60.0))


def _configuration(case: Case, folder: str) -> Any:
    from tests.distributed.parity import configuration

    publish = {"bucket_bytes": BUCKET_BYTES, "timeout_seconds": 30.0, "fallback": False}
    path = Path(folder) / case.family
    return configuration(dataclasses.replace(case, settings=case.settings | {"publish": publish}), path)


def _publisher(config: Any, model: Any, fleet: Any) -> Any:
    import torch.distributed as dist

    from megatron_a3po.runtime.timing import PhaseTimer
    from megatron_a3po.weights.build import build_publisher

    gloo_group = dist.new_group(backend="gloo")
    assert isinstance(gloo_group, dist.ProcessGroup)
    mine = fleet if int(os.environ["RANK"]) == 0 else None
    return build_publisher(config, model.chunks, model.groups, mine, gloo_group, timer=PhaseTimer())


def _print_errors(work: Callable[[], object], message: str = "nothing was raised") -> None:
    """Of all ranks; `message` where there is none."""
    import torch.distributed as dist

    from megatron_a3po.errors import PublishError
    from megatron_a3po.parallel.messages import gather_json

    try:
        work()
    except PublishError as error:
        message = str(error)
    messages = gather_json(message)
    if dist.get_rank() == 0:
        print(json.dumps(messages), flush=True)

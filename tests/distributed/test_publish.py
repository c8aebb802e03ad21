"""Publication from several ranks to scripted servers, whose receivers are real ranks of the update groups."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import end_model_parallel, run_ranks
from tests.distributed.publish_cases import PUBLISHED, Case, changed_policy, encoded, expected_bytes
from tests.tiny_models import save_tiny_model
from tests.unit.scripted_server import Receiver, ScriptedServer, refuse, start_receiver
from tests.unit.test_publisher import UPDATE, serve

BUCKET_BYTES = 100_000


@pytest.mark.distributed
def test_two_servers_receive_the_models_tensors_from_every_layout(tmp_path: Path) -> None:
    for family in {case.family for case in PUBLISHED}:
        save_tiny_model(family, tmp_path / family)
    with start_receiver() as first, start_receiver() as second, serve(first, second) as servers:
        urls = json.dumps([server.url for server in servers])
        output = run_ranks(_publish, 4, json.dumps(encoded(PUBLISHED)), str(tmp_path), urls, timeout_seconds=200.0)
        received = [_received(server, receiver) for server, receiver in zip(servers, (first, second), strict=True)]

    reports = [json.loads(line) for line in output.splitlines() if line.startswith('{"title"')]
    assert [report["title"] for report in reports] == [case.title for case in PUBLISHED]
    for publications in received:
        assert [publication["version"] for publication in publications] == ["0", "1"] * len(PUBLISHED)
        for number, publication in enumerate(publications):
            case = PUBLISHED[number // 2]
            expected = expected_bytes(tmp_path / case.family, times=1 + number % 2)
            assert publication["tensors"].keys() == expected.keys(), case.title
            wrong = [name for name, content in publication["tensors"].items() if content != expected[name]]
            assert wrong == [], case.title
            assert len(publication["groups"]) == case.parallel.get("pipeline", 1), case.title
            minimum = sum(map(len, expected.values()))
            assert publication["bytes"] <= 1.02 * minimum
            largest_part = max(map(len, expected.values()))
            assert max(publication["sizes"]) <= max(BUCKET_BYTES, 8 * largest_part)


def _received(server: ScriptedServer, receiver: Receiver) -> list[dict[str, Any]]:
    """Publication by publication; a name that comes twice in one is an error."""
    publications: list[dict[str, Any]] = []
    requests = server.bodies(UPDATE)
    assert len(requests) == len(receiver.buffers)
    tensors: dict[str, bytes] = {}
    groups: set[str] = set()
    sizes: list[int] = []
    for request, buffer in zip(requests, receiver.buffers, strict=True):
        start = 0
        for name, dtype, shape in zip(request["names"], request["dtypes"], request["shapes"], strict=True):
            assert dtype == "float32" and name not in tensors
            size = 4
            for length in shape:
                size *= length
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
        output = run_ranks(_fail, 4, str(tmp_path), urls, timeout_seconds=100.0)

    lacking, refused = (json.loads(line) for line in output.splitlines() if line.startswith('["'))
    assert len(set(lacking)) == 1 and len(lacking) == 4
    assert "rank 3" in lacking[0] and "decoder.layers.3.mlp.linear_fc2.weight" in lacking[0]
    assert len(set(refused)) == 1 and len(refused) == 4
    assert "version 0 was not published" in refused[0] and "partially updated" in refused[0]
    assert servers[1].url in refused[0] and "bucket model." in refused[0]
    assert all("/continue_generation" not in server.paths() for server in servers)


def _publish(cases: str, folder: str, urls: str) -> None:
    import torch
    import torch.distributed as dist

    from tests.unit.test_publisher import control

    _start()
    for case in [Case(**fields) for fields in json.loads(cases)]:
        model = changed_policy(case, Path(folder) / case.family)
        with control(*json.loads(urls)) as receivers:
            config = _configuration(case, folder)
            with _publisher(config, model, receivers) as publisher:
                for version in range(2):
                    publisher.publish(version)
                    with torch.no_grad():
                        for chunk in model.chunks:
                            for parameter in chunk.parameters():
                                parameter.mul_(1.25)
                            for _, buffer in _buffers(chunk):
                                buffer.mul_(1.25)
        if dist.get_rank() == 0:
            print(json.dumps({"title": case.title}), flush=True)
        end_model_parallel()
    dist.destroy_process_group()


def _fail(folder: str, urls: str) -> None:
    import torch.distributed as dist

    from megatron_a3po.runtime.processes import end_process
    from tests.unit.test_publisher import control

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
    with control(*json.loads(urls)) as receivers:

        def publish() -> None:
            with _publisher(config, model, receivers) as publisher:
                publisher.publish(0)

        _print_errors(publish)
    end_process(0)  # a broadcast that nobody joins any more is left behind


def _start() -> None:
    import torch

    from megatron_a3po import cpu
    from megatron_a3po.parallel.layout import RankInfo, init_distributed

    cpu.install()
    torch.set_num_threads(1)
    init_distributed(RankInfo.from_environment(), "cpu", 60.0)


def _configuration(case: Case, folder: str) -> Any:
    from tests.distributed.parity import configuration

    publish = {"bucket_bytes": BUCKET_BYTES, "timeout_seconds": 30.0, "fallback": False}
    path = Path(folder) / case.family
    return configuration(Case(family=case.family, parallel=case.parallel, settings={"publish": publish}), path)


def _publisher(config: Any, model: Any, receivers: Any) -> Any:
    import torch.distributed as dist

    from megatron_a3po.runtime.timing import PhaseTimer
    from megatron_a3po.weights.building import build_publisher

    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    mine = receivers if int(os.environ["RANK"]) == 0 else None
    return build_publisher(config, model.chunks, model.groups, mine, control, timer=PhaseTimer())


def _buffers(chunk: Any) -> Any:
    from megatron.bridge.models.conversion.utils import persistent_buffers

    return persistent_buffers(chunk)


def _print_errors(work: Any) -> None:
    import torch.distributed as dist

    from megatron_a3po.errors import PublishError
    from megatron_a3po.parallel.messages import gather_json

    message = "nothing was raised"
    try:
        work()
    except PublishError as error:
        message = str(error)
    messages = gather_json(message)
    if dist.get_rank() == 0:
        print(json.dumps(messages), flush=True)

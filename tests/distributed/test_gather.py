"""Collected weights against the Hugging Face files that they were loaded from, byte for byte."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import end_model_parallel, run_ranks
from tests.distributed.publish_cases import COLLECTED, Case, changed_policy, encoded, expected_bytes
from tests.support.deadlines import scaled

SMALL_BUCKET = 60_000
"""Bytes: several buckets on each stage, and parts that are larger than one."""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of all cases in one start of the ranks, which takes longer than the cases."""
    folder = str(tmp_path_factory.mktemp("models"))
    return run_ranks(_collect, 4, json.dumps(encoded(COLLECTED)), folder, timeout_seconds=280.0)


@pytest.mark.distributed
def test_the_collected_tensors_are_those_of_the_model_in_every_layout(output: str) -> None:
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"title"')]
    assert [case["title"] for case in found] == [case.title for case in COLLECTED]
    assert [case for case in found if case["differing"] or case["missing"] or case["unknown"]] == []
    for case, planned in zip(COLLECTED, found, strict=True):
        assert len(planned["owners"]) == case.parallel.get("pipeline", 1)
        assert planned["num_buckets"] > 2 * len(planned["owners"])
        assert planned["bytes"] == planned["minimum_bytes"]


@pytest.mark.distributed
def test_weights_are_in_fp8_where_the_servers_want_it_and_memory_stays_within_bounds(output: str) -> None:
    found = json.loads(next(line for line in output.splitlines() if line.startswith('{"differing"')))
    assert found["differing"] == [] and found["missing"] == []
    assert found["num_fp8"] == 4 * (4 + 3 * 8)  # of each layer: attention's and three of each expert
    # Two buffers; and of the piece that is under way: what is received, put together and converted.
    assert found["peak_bytes"] <= 2 * found["bucket_bytes"] + 4 * found["piece_bytes"]


def _collect_in_fp8(folder: str) -> None:
    import torch
    import torch.distributed as dist

    from megatron_a3po.hf.quantize import quantization_config
    from megatron_a3po.weights.gather import WeightCollector
    from megatron_a3po.weights.served_precision import fp8_rule
    from tests.distributed.live_bytes import LiveBytes

    rank = dist.get_rank()
    case = Case(family="qwen3_moe", parallel={"tensor": 2, "pipeline": 2, "expert": 2})
    path = Path(folder) / case.family
    model = changed_policy(case, path)
    gloo_group = dist.new_group(backend="gloo")
    assert isinstance(gloo_group, dist.ProcessGroup)
    rule = fp8_rule(quantization_config(["lm_head"]))
    collector = WeightCollector(model.chunks, model.groups, path, gloo_group, bucket_bytes=1 << 18, is_fp8=rule)
    plan = collector.plan
    pieces = [sum(plan.parts[number].nbytes for number in piece) for bucket in plan.buckets for piece in bucket.pieces]
    with LiveBytes() as live:
        own = [torch.empty(plan.largest_bucket(rank), dtype=torch.uint8) for _ in range(2)]
        for turn, bucket in enumerate(plan.buckets):
            collector.fill(bucket, own[turn % 2][: bucket.nbytes] if bucket.owner == rank else None)
    found = dict(collector.tensors())
    if rank == 0:
        expected = _in_fp8(expected_bytes(path), found)
        result = {
            "differing": [name for name, tensor in expected.items() if not torch.equal(found[name].float(), tensor)],
            "missing": sorted(expected.keys() ^ found.keys()),
            "num_fp8": sum(tensor.dtype == torch.float8_e4m3fn for tensor in found.values()),
            "peak_bytes": live.peak,
            "bucket_bytes": plan.largest_bucket(0),
            # In the precision of the model, not of the wire.
            "piece_bytes": 4 * max(pieces),
        }
        print(json.dumps(result), flush=True)
    end_model_parallel()


def _in_fp8(expected: dict[str, bytes], found: dict[str, Any]) -> dict[str, Any]:
    """The tiny model's matrices are smaller than a block, so that each has one scale: its largest magnitude / 448."""
    import torch

    converted = {}
    for name, content in expected.items():
        whole = torch.frombuffer(bytearray(content), dtype=torch.float32).view(found[name].shape)
        if name + "_scale_inv" in found:
            scale = whole.abs().max() / 448
            converted[name] = (whole / scale).to(torch.float8_e4m3fn).float()
            converted[name + "_scale_inv"] = scale.view(1, 1)
        else:
            converted[name] = whole
    return converted


def _collect(cases: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from megatron_a3po import cpu
    from megatron_a3po.parallel.layout import RankInfo, init_distributed

    cpu.install()
    from megatron_a3po.weights import plan
    from megatron_a3po.weights.gather import WeightCollector

    plan._MIN_PIECE_BYTES = 1  # also buckets of so small a model are collected in several steps
    torch.set_num_threads(1)
    info = RankInfo.from_environment()
    init_distributed(info, "cpu", scaled(60.0))
    for case in [Case(**fields) for fields in json.loads(cases)]:
        path = Path(folder) / case.family
        model = changed_policy(case, path)
        gloo_group = dist.new_group(backend="gloo")
        assert isinstance(gloo_group, dist.ProcessGroup)
        collector = WeightCollector(model.chunks, model.groups, path, gloo_group, bucket_bytes=SMALL_BUCKET)
        found = {name: tensor.contiguous().numpy().tobytes() for name, tensor in collector.tensors()}
        if info.rank == 0:
            expected = expected_bytes(path)
            result = {
                "title": case.title,
                "differing": [name for name in found.keys() & expected.keys() if found[name] != expected[name]],
                "missing": sorted(expected.keys() - found.keys()),
                "unknown": sorted(found.keys() - expected.keys()),
                "owners": collector.plan.owners,
                "num_buckets": len(collector.plan.buckets),
                "bytes": collector.plan.nbytes,
                "minimum_bytes": sum(map(len, expected.values())),
            }
            print(json.dumps(result), flush=True)
        end_model_parallel()
    _collect_in_fp8(folder)
    dist.destroy_process_group()

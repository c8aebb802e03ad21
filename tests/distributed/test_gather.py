"""Collected weights against the Hugging Face files that they were loaded from, byte for byte."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import end_model_parallel, run_ranks
from tests.distributed.publish_cases import COLLECTED, Case, changed_policy, encoded, expected_bytes

SMALL_BUCKET = 60_000
"""Bytes: several buckets on each stage, and parts that are larger than one."""


@pytest.mark.distributed
def test_the_collected_tensors_are_those_of_the_model_in_every_layout(tmp_path: Path) -> None:
    output = run_ranks(_collect, 4, json.dumps(encoded(COLLECTED)), str(tmp_path), timeout_seconds=200.0)

    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"title"')]
    assert [case["title"] for case in found] == [case.title for case in COLLECTED]
    assert [case for case in found if case["differing"] or case["missing"] or case["unknown"]] == []
    for case, planned in zip(COLLECTED, found, strict=True):
        assert len(planned["owners"]) == case.parallel.get("pipeline", 1)
        assert planned["num_buckets"] > 2 * len(planned["owners"])
        assert planned["bytes"] == planned["minimum_bytes"]


def _collect(cases: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from megatron_a3po import cpu
    from megatron_a3po.parallel.layout import RankInfo, init_distributed

    cpu.install()
    from megatron_a3po.weights.gather import WeightCollector

    torch.set_num_threads(1)
    info = RankInfo.from_environment()
    init_distributed(info, "cpu", 60.0)
    for case in [Case(**fields) for fields in json.loads(cases)]:
        path = Path(folder) / case.family
        model = changed_policy(case, path)
        control = dist.new_group(backend="gloo")
        assert isinstance(control, dist.ProcessGroup)
        collector = WeightCollector(model.chunks, model.groups, path, control, bucket_bytes=SMALL_BUCKET)
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
    dist.destroy_process_group()

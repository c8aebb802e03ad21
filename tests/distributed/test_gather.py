"""Collected and exported weights against the Hugging Face files that they were loaded from, byte for byte."""

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    """What all cases print in one start of the ranks, which takes longer than the cases."""
    return run_ranks(_collect, 4, json.dumps(encoded(COLLECTED)), str(folder), timeout_seconds=280.0)


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


@pytest.mark.distributed
def test_an_export_has_the_trainers_weights_unquantised_where_servers_and_start_folder_are_in_fp8(
    output: str, folder: Path
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from megatron_a3po.hf.folder import HfFolder

    assert output
    exported = HfFolder.open(folder / "exported")
    assert not exported.is_quantized and "quantization_config" not in exported.config
    loaded = AutoModelForCausalLM.from_pretrained(exported.path).state_dict()
    expected = load_file(folder / "exported_of" / "model.safetensors")
    assert set(exported.names()) == loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == exported.dtype(name) == torch.float32
        assert torch.equal(tensor, expected[name] * 1.25), name


def _export(folder: Path) -> None:
    """Export as a run does whose servers hold FP8, and whose start folder says that it does. Collective."""
    import torch.distributed as dist

    from megatron_a3po.hf.export import save_hf_folder
    from megatron_a3po.hf.quantize import quantization_config
    from megatron_a3po.weights.gather import WeightCollector
    from megatron_a3po.weights.served_precision import fp8_rule

    rank, source = dist.get_rank(), folder / "exported_of"
    model = changed_policy(Case(family="qwen3", parallel={"tensor": 2, "pipeline": 2}), source)
    gloo_group = dist.new_group(backend="gloo")
    assert isinstance(gloo_group, dist.ProcessGroup)
    rule = fp8_rule(quantization_config())
    collector = WeightCollector(model.chunks, model.groups, source, gloo_group, bucket_bytes=SMALL_BUCKET, is_fp8=rule)
    assert any(spec.dtype.itemsize == 1 for spec in collector.plan.tensors)
    if rank == 0:
        described = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(described | {"quantization_config": quantization_config()}))
    save_hf_folder(collector.tensors(), source, folder / "exported", rank=rank)
    end_model_parallel()


def _collect_in_fp8(folder: str) -> None:
    import torch
    import torch.distributed as dist

    from megatron_a3po.hf.quantize import quantization_config
    from megatron_a3po.parallel.messages import gather_json
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
    collected: dict[str, Any] = {}
    for bucket in plan.buckets:
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8) if bucket.owner == rank else None
        collector.fill(bucket, buffer)
        collected |= bucket.views(buffer) if buffer is not None else {}
    expected = _in_fp8(expected_bytes(path), {spec.name: spec.shape for spec in plan.tensors})
    differing = [name for name, tensor in collected.items() if not torch.equal(tensor.float(), expected[name])]
    found = gather_json([differing, list(collected)], gloo_group)
    if rank == 0:
        result = {
            "differing": [name for names, _ in found for name in names],
            "missing": sorted(expected.keys() ^ {name for _, names in found for name in names}),
            "num_fp8": sum(spec.dtype == torch.float8_e4m3fn for spec in plan.tensors),
            "peak_bytes": live.peak,
            "bucket_bytes": plan.largest_bucket(0),
            # In the precision of the model, not of the wire.
            "piece_bytes": 4 * max(pieces),
        }
        print(json.dumps(result), flush=True)
    end_model_parallel()


def _in_fp8(expected: dict[str, bytes], shapes: dict[str, Any]) -> dict[str, Any]:
    """The tiny model's matrices are smaller than a block, so that each has one scale: its largest magnitude / 448."""
    import torch

    converted = {}
    for name, content in expected.items():
        whole = torch.frombuffer(bytearray(content), dtype=torch.float32).view(shapes[name])
        if name + "_scale_inv" in shapes:
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
    _export(Path(folder))
    dist.destroy_process_group()

"""Compare the time of collecting and publishing weights on CPUs with that of megatron-bridge's export.

    python tools/benchmark_publish.py [--size tiny|small] [--tensor 2] [--pipeline 2] [--expert 1] [--servers 2]
                                      [--repeats 7] [--json FILE]

Starts tensor x pipeline ranks and, in place of rollout servers, processes that receive and drop what is sent. Every
repeat runs all variants in turn; figures are medians over the repeats:

bridge export       megatron-bridge's export alone: every tensor on every rank, nothing is sent
overlap             collecting and publishing in buckets of an eighth of the model, filling one while sending another
no overlap          the same with one buffer
whole, half, ...     like overlap, with another bucket size
per tensor          like overlap, with one bucket per tensor
ratio               time over that of the bridge's export in the same repeat; noise: half the distance of the quartiles
                    over the median
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, cast

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 259},
    "small": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 8003},
}
SHARES = {"overlap": 8, "no overlap": 8, "whole": 1, "half": 2, "quarter": 4, "sixteenth": 16}


class DroppingServers:
    """Processes in the place of rollout servers: each joins the groups, receives every bucket and forgets it."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.urls = ["http://127.0.0.1:1"] * number
        self.group_world_size = 1 + number
        self.revision = 0
        self._version = ""
        self._pipes: list[Connection[Any, Any]] = []
        self._threads = ThreadPoolExecutor(number)
        for _ in range(number):
            ours, theirs = context.Pipe()
            context.Process(target=_receive, args=(theirs,), daemon=True).start()
            self._pipes.append(ours)

    def _call(self, *commands: tuple[Any, ...]) -> "Future[Any]":
        def call(pipe: "Connection[Any, Any]", command: tuple[Any, ...]) -> Any:
            pipe.send(command)
            return pipe.recv()

        futures = [
            self._threads.submit(call, pipe, command) for pipe, command in zip(self._pipes, commands, strict=True)
        ]
        whole: Future[Any] = Future()
        remaining = len(futures)

        def finished(_: "Future[Any]") -> None:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                whole.set_result(None)

        for future in futures:
            future.add_done_callback(finished)
        return whole

    def create_group(self, name: str, address: str, port: int, backend: str, timeout_seconds: float) -> "Future[Any]":
        place = f"tcp://{address}:{port}"
        commands = [
            ("join", name, place, rank, self.group_world_size, backend) for rank in range(1, self.group_world_size)
        ]
        return self._call(*commands)

    def destroy_group(self, name: str) -> "Future[Any]":
        return self._call(*[("leave", name)] * len(self._pipes))

    def update(self, body: dict[str, Any], timeout_seconds: float) -> "Future[Any]":
        self._version = body.get("weight_version", self._version)
        sizes = zip(body["shapes"], body["dtypes"], strict=True)
        import torch

        num_bytes = sum(torch.Size(shape).numel() * getattr(torch, dtype).itemsize for shape, dtype in sizes)
        return self._call(*[("receive", body["group_name"], num_bytes)] * len(self._pipes))

    def checksums(self) -> dict[str, list[dict[str, str]]]:
        return {url: [{}] for url in self.urls}

    def update_from_disk(self, folder: str, version: str, timeout_seconds: float) -> None:
        raise NotImplementedError

    def versions(self) -> dict[str, str]:
        return dict.fromkeys(self.urls, self._version)

    def recover(self, version: int) -> Literal["done", "again", "failed"]:
        return "failed"

    def counts(self) -> dict[str, float]:
        return {}

    def settle_members(self, *, call_back: str) -> None: ...
    def mark_failed(self) -> None: ...
    def end_publication(self) -> None: ...
    def reject(self, problems: Mapping[str, str]) -> None: ...
    def confirm(self, version: int) -> None: ...
    def leave_stale_group(self, name: str) -> None: ...
    def pause(self) -> None: ...
    def begin(self, version: int) -> None: ...
    def end(self) -> None: ...
    def flush(self) -> None: ...
    def resume(self) -> None: ...


def _receive(pipe: "Connection[Any, Any]") -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups: dict[str, Any] = {}
    while True:
        try:
            command, name, *rest = pipe.recv()
        except EOFError:
            return
        if command == "join":
            place, rank, world_size, backend = rest
            store, _, _ = next(c10d.rendezvous(place, rank, world_size, timeout=timeout))
            groups[name], _ = c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                c10d.Backend(backend),
                c10d.PrefixStore(name, store),
                group_name=c10d.GroupName(name),
                timeout=timeout,
            )
            c10d._world.pg_group_ranks[groups[name]] = {rank: rank for rank in range(world_size)}
        elif command == "receive":
            dist.broadcast(torch.empty(rest[0], dtype=torch.uint8), group_src=0, group=groups[name])
        else:
            dist.destroy_process_group(groups.pop(name))
        pipe.send(None)


def run_rank(options: argparse.Namespace, folder: Path) -> None:
    from megatron_a3po import cpu

    cpu.install()
    import torch
    import torch.distributed as dist

    from megatron_a3po.actor.fusions import detect_fusions
    from megatron_a3po.actor.model import build_model
    from megatron_a3po.config import RunConfig
    from megatron_a3po.parallel.layout import RankInfo, init_distributed

    torch.set_num_threads(1)
    info = RankInfo.from_environment()
    gloo_group = init_distributed(info, "cpu", 300.0)
    config = RunConfig.model_validate(
        {
            "model": folder,
            "run_dir": folder,
            "num_steps": 1,
            "device": "cpu",
            "data": {"task": "spell_backward"},
            "parallel": {"tensor": options.tensor, "pipeline": options.pipeline, "expert": options.expert},
        }
    )
    model = build_model(config, detect_fusions())
    servers = DroppingServers(options.servers) if info.rank == 0 else None
    ways, details = make_ways(model, folder, servers, gloo_group)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(options.repeats + 1):
        for way, work in ways.items():
            dist.barrier()
            start = time.perf_counter()
            work(repeat)
            dist.barrier()
            if repeat > 0:  # the first one warms up
                seconds[way].append(time.perf_counter() - start)
    if info.rank == 0:
        (folder / "result.json").write_text(json.dumps({"seconds": seconds, "details": details}))
    from megatron_a3po.runtime.processes import end_process

    end_process(0)


def make_ways(
    model: Any, folder: Path, servers: DroppingServers | None, gloo_group: Any
) -> tuple[dict[str, Callable[[int], Any]], dict[str, Any]]:
    """Ways of publication by name, each to be called with a version; collective. And what is known about each."""
    from megatron_a3po.runtime.timing import PhaseTimer
    from megatron_a3po.weights.gather import WeightCollector
    from megatron_a3po.weights.publisher import WeightPublisher
    from megatron_a3po.weights.transports.group import GroupTransport

    def publisher(bucket_bytes: int, num_buffers: int = 2) -> WeightPublisher:
        collector = WeightCollector(model.chunks, model.groups, folder, gloo_group, bucket_bytes=bucket_bytes)
        groups = GroupTransport(
            collector.plan, cast(Any, servers), gloo_group, run_id="benchmark", backend="gloo", timeout_seconds=60.0
        )
        return WeightPublisher(
            collector, groups, cast(Any, servers), gloo_group, timer=PhaseTimer(), num_buffers=num_buffers
        )

    whole = WeightCollector(model.chunks, model.groups, folder, gloo_group, bucket_bytes=1 << 40).plan.nbytes
    publishers = {
        way: publisher(-(-whole // share), 1 if way == "no overlap" else 2) for way, share in SHARES.items()
    } | {"per tensor": publisher(1)}
    ways: dict[str, Callable[[int], Any]] = {
        "bridge export": lambda _: list(model.bridge.export_hf_weights(list(model.chunks), show_progress=False))
    }
    ways |= {way: each.publish for way, each in publishers.items()}
    details = {
        way: {
            "num_buckets": len(each.plan.buckets),
            "wire_bytes_over_minimum": each.plan.nbytes / whole,
            "staging_buckets": each.staging_bytes / max(bucket.nbytes for bucket in each.plan.buckets),
        }
        for way, each in publishers.items()
    }
    return ways, details


def save_model(options: argparse.Namespace, folder: Path) -> None:
    import torch
    import transformers

    shape = SIZES[options.size] | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    common: dict[str, Any] = shape | {"tie_word_embeddings": False, "dtype": "bfloat16"}
    if options.expert > 1:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "mlp_only_layers": []}
        config: Any = transformers.Qwen3MoeConfig(**common, **experts)
    else:
        config = transformers.Qwen3Config(**common)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)


def table(result: dict[str, Any]) -> str:
    base = statistics.median(result["seconds"]["bridge export"])
    lines = [f"{'':16} {'ratio':>6} {'noise':>6} {'buckets':>8} {'wire/minimum':>13} {'staging buckets':>16}"]
    for way, seconds in result["seconds"].items():
        lower, median, upper = statistics.quantiles(seconds, n=4)
        details = result["details"].get(way)
        more = (
            f"{details['num_buckets']:8d} {details['wire_bytes_over_minimum']:13.3f} {details['staging_buckets']:16.2f}"
            if details
            else ""
        )
        lines.append(f"{way:16} {median / base:6.2f} {(upper - lower) / 2 / median:6.0%} {more}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    for name, default in {"tensor": 2, "pipeline": 2, "expert": 1, "servers": 2, "repeats": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, help="write all times to this file")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # given to the ranks
    options = parser.parse_args()
    if options.folder is not None:
        run_rank(options, options.folder)
    with tempfile.TemporaryDirectory(prefix="publish-") as folder:
        save_model(options, Path(folder))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        num_ranks = options.tensor * options.pipeline
        command = [sys.executable, *launcher, str(num_ranks), __file__, *sys.argv[1:], "--folder", folder]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=900)
        result = json.loads((Path(folder) / "result.json").read_text())
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

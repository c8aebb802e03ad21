"""Versions as changes on a real SGLang server, whose machine follows them by the tool for that, against whole ones."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import end_model_parallel, run_ranks
from tests.distributed.publish_cases import Case, changed_policy
from tests.e2e.conftest import SERVER_START_SECONDS
from tests.e2e.runs import ROOT, environment, get, post, wait_until
from tests.support.deadlines import scaled
from tests.support.documented_metrics import undocumented
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

CASE = Case(family="qwen3", parallel={"pipeline": 2}, settings={"precision": "bf16"})
VERSIONS = range(1, 6)
FOLLOWER_KILLED_BEFORE = 4


def test_a_server_holds_after_changes_what_it_holds_after_whole_versions(tmp_path: Path) -> None:
    from megatron_a3po.serving.local_server import LocalServer

    model = tmp_path / CASE.family
    save_tiny_model(CASE.family, model)
    arguments = ["--skip-tokenizer-init", "--dtype", "bfloat16"]
    with LocalServer(model, tmp_path / "server.log", arguments) as server:
        wait_until(lambda: get(f"{server.url}/ready")[0] == 200, SERVER_START_SECONDS, server.describe_death)
        output = run_ranks(_publish, 2, str(tmp_path), server.url, timeout_seconds=400.0)
        last = _checksums(server.url)
        for file in (tmp_path / "local").glob("version_*/*.safetensors"):
            file.write_bytes(bytes(file.stat().st_size))
        assert _checksums(server.url) == last, "the next version is made of files that the server still uses"

    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"version"')]
    assert [entry["version"] for entry in found] == list(VERSIONS)
    for entry in found:
        assert len(entry["by_changes"]) > 20 and entry["by_changes"] == entry["whole"]
        assert entry["model_path"].startswith(str(tmp_path / "local" / f"version_0000000{entry['version']}_"))
    for before, after in itertools.pairwise(found):
        assert all(before["whole"][name] != checksum for name, checksum in after["whole"].items())
    nbytes = found[0]["metrics"]["published_bytes"]
    assert found[0]["metrics"]["publish_written_bytes"] > nbytes
    assert undocumented([entry["metrics"] for entry in found]) == set()
    for entry in found[1:]:
        assert 0.01 < entry["metrics"]["publish_density"] <= 0.02
        assert entry["metrics"]["publish_written_bytes"] < 0.2 * nbytes


def _publish(folder: str, url: str) -> None:
    import torch
    import torch.distributed as dist

    from megatron_a3po import cpu
    from megatron_a3po.parallel.layout import RankInfo, init_distributed
    from megatron_a3po.runtime.timing import PhaseTimer
    from megatron_a3po.weights.build import build_publisher
    from tests.distributed.parity import configuration
    from tests.support.publishing import fleet_of

    cpu.install()
    torch.set_num_threads(1)
    is_first = RankInfo.from_environment().rank == 0
    init_distributed(RankInfo.from_environment(), "cpu", scaled(120.0))
    path = Path(folder) / CASE.family
    model = changed_policy(CASE, path)

    def configured(name: str, **publish: object) -> Any:
        common = {"bucket_bytes": 100_000, "timeout_seconds": 60.0, "transport": "disk", "folder": f"{folder}/{name}"}
        settings = {**CASE.settings, "publish": common | publish, "rollout": {"servers": [url]}}
        return configuration(Case(family=CASE.family, parallel=CASE.parallel, settings=settings), path)

    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    with fleet_of(url) as fleet, _follower(folder, is_first) as follow_again:
        publishers = [
            build_publisher(config, model.chunks, model.groups, fleet if is_first else None, group, timer=PhaseTimer())
            for config in (configured("deltas", delta_folder=f"{folder}/local"), configured("whole"))
        ]
        for version in VERSIONS:
            if is_first and version == FOLLOWER_KILLED_BEFORE:
                follow_again()
            result = {"version": version, "metrics": publishers[0].publish(version)}
            if is_first:
                result["by_changes"] = _checksums(url)
                result["model_path"] = json.loads(get(f"{url}/model_info")[1])["model_path"]
            publishers[1].publish(version)
            if is_first:
                print(json.dumps(result | {"whole": _checksums(url)}), flush=True)
            with torch.no_grad():
                for parameter in (parameter for chunk in model.chunks for parameter in chunk.parameters()):
                    parameter.view(-1)[version::64] *= -1.5
    end_model_parallel()
    dist.destroy_process_group()


@contextmanager
def _follower(folder: str, is_first: bool) -> Iterator[Callable[[], None]]:
    """The tool beside the server; called, it kills it in the middle of anything and starts it again."""
    command = [sys.executable, "tools/apply_weight_delta.py", f"{folder}/deltas", f"{folder}/local"]
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        for process in processes:
            process.kill()
            process.wait(scaled(10.0))
        with Path(folder, "follower.log").open("ab") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log))

    if is_first:
        start()
    try:
        yield start
    finally:
        for process in processes:
            process.terminate()
            process.wait(scaled(10.0))


def _checksums(url: str) -> dict[str, str]:
    (rank,) = post(f"{url}/weights_checker", {"action": "checksum"})["ranks"]
    found: dict[str, str] = rank["checksums"]
    return found

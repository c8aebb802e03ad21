"""Starting whole runs as a user would, and looking at what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.distributed.launch import end_of_ranks, output_of
from tests.support.deadlines import scaled
from tests.support.paths import ROOT

CONFIG = "configs/tiny_cpu.yaml"


def environment() -> dict[str, str]:
    values = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    values.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process compiles the libraries again
    return values


def torchrun(*overrides: str, ranks: int = 4) -> list[str]:
    program = ["-m", "megatron_a3po", "train", "--config", CONFIG, *overrides]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a session of its own, with its output in `log`; whatever is left of it is killed at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        for survivor in [*descendants(process.pid), process.pid]:
            try:
                os.kill(survivor, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def train_in_forks(
    *overrides: str, ranks: int, log: Path, timeout_seconds: float, config: str = CONFIG
) -> tuple[int, str]:
    """(exit code, all output) of what `torchrun` would start, without the imports, which take most of its start."""
    ended = end_of_ranks(_train, ranks, config, *overrides, log=log, timeout=timeout_seconds)
    assert not ended.is_late, output_of(log, 0)
    code = next((code for code in ended.codes if code), 0)
    return code, "".join(output_of(log, rank) for rank in range(ranks))


def _train(config: str, *overrides: str) -> None:
    from megatron_a3po.__main__ import main
    from megatron_a3po.runtime.processes import end_process

    end_process(main(["train", "--config", config, *overrides]))


def run_to_end(command: list[str], log: Path, timeout_seconds: float) -> tuple[int, str]:
    """(exit code, all output)"""
    with started(command, log) as process:
        code = process.wait(scaled(timeout_seconds))
    return code, log.read_text(errors="replace")


def descendants(process_id: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(process_id).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def alive(process_ids: list[int]) -> list[int]:
    return [number for number in process_ids if psutil.pid_exists(number) and _status(number) != psutil.STATUS_ZOMBIE]


def _status(process_id: int) -> str:
    try:
        return psutil.Process(process_id).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def find_server(process_id: int) -> int | None:
    """The SGLang server among a run's processes."""
    for child in descendants(process_id):
        try:
            if "megatron_a3po.serving.entrypoint" in psutil.Process(child).cmdline():
                return child
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return None


def wait_until(
    condition: Callable[[], Any], timeout_seconds: float, describe: Callable[[], str | None] = lambda: None
) -> None:
    deadline = time.monotonic() + scaled(timeout_seconds)
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_seconds:g} s; {describe() or ''}"
        assert describe() is None, describe()
        time.sleep(0.2)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def get(url: str) -> tuple[int, str]:
    """Status and body of a GET; status 0 without an answer."""
    return _open(urllib.request.Request(url))


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    status, text = _open(request)
    assert status == 200, f"{url}: {status} {text}"
    return json.loads(text)


def _open(request: urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(request, timeout=scaled(30)) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except (OSError, urllib.error.URLError):
        return 0, ""

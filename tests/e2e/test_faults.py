"""What a run does when something is taken away from it. The server here is the run's own (`rollout.servers: local`)."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.runs import alive, descendants, find_server, metrics, started, torchrun, wait_until
from tests.support.deadlines import scaled

pytestmark = pytest.mark.e2e


@contextmanager
def run_in_full_swing(
    model: Path, tmp_path: Path, start: Callable[..., list[str]]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A run after its second step; `start` returns its command, to which it is given the settings."""
    log, run_dir = tmp_path / "output.log", tmp_path / "run"
    settings = [f"model={model}", f"run_dir={run_dir}", "rollout.prompts_per_step=8", "data.num_held_out=32"]
    with started(start(*settings), log) as process:
        wait_until(
            lambda: len(metrics(run_dir)) > 2,
            240.0,
            lambda: f"the run ended:\n{log.read_text()}" if process.poll() is not None else None,
        )
        yield process, log


def quickstart(*settings: str) -> list[str]:
    return ["bash", "examples/run_a3po_tiny_cpu.sh", *settings]


def test_a_run_whose_server_is_killed_ends_with_the_reason_and_leaves_no_process(model: Path, tmp_path: Path) -> None:
    with run_in_full_swing(model, tmp_path, partial(torchrun, "parallel.pipeline=1", ranks=2)) as (process, log):
        everything = descendants(process.pid)
        server = find_server(process.pid)
        assert server is not None
        os.kill(server, signal.SIGKILL)
        killed_at = time.monotonic()

        assert process.wait(scaled(60.0)) != 0
        output = log.read_text()
        assert f"the rollout server (process {server}) was killed by SIGKILL" in output
        assert output.count("error on rank") == 1, output
        assert str(tmp_path / "run" / "logs") in output
        wait_until(lambda: not alive(everything), 60.0 - (time.monotonic() - killed_at))


@pytest.mark.parametrize(
    "whom",
    ["terminal", *(pytest.param(whom, marks=pytest.mark.nightly) for whom in ("script", "rank 0", "rank 3"))],
)
def test_an_interrupted_run_leaves_no_process(model: Path, tmp_path: Path, whom: str) -> None:
    with run_in_full_swing(model, tmp_path, quickstart) as (process, log):
        everything = descendants(process.pid)
        if whom == "terminal":
            os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches the whole foreground group
        elif whom == "script":
            process.kill()
        else:
            os.kill(_rank(everything, whom.removeprefix("rank ")), signal.SIGKILL)

        assert process.wait(scaled(60.0)) != 0
        wait_until(lambda: not alive(everything), 40.0)
        if whom in ("terminal", "script"):
            assert "ended by SIG" in log.read_text()
        else:
            assert f"failed (exitcode: -9) local_rank: {whom[-1]}" in log.read_text()


def _rank(process_ids: list[int], rank: str) -> int:
    for number in process_ids:
        variables = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{number}/cmdline").read_bytes()
        if f"RANK={rank}".encode() in variables and b"megatron_a3po" in command:
            return number
    raise AssertionError(f"no rank {rank} among {process_ids}")

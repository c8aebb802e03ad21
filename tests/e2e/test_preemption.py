"""A run that the scheduler takes the machine from saves, ends with the exit code for trying again, and goes on."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_a3po.checkpoint.store import checkpoint_folders
from megatron_a3po.runtime.manifest import check
from tests.e2e.runs import alive, descendants, metrics, run_to_end, started, wait_until
from tests.support.deadlines import scaled
from tests.support.scripted_rollouts import make_model, scripted_server, settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TWO_RANKS = {"tensor": 1, "pipeline": 2}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server() as server:
        yield server.url


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def torchrun(config: dict[str, Any], folder: Path, *options: str) -> list[str]:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    program = ["-m", "megatron_a3po", "train", "--config", str(file)]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options, *program]


@contextmanager
def run_after_two_steps(command: list[str], run: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with started(command, log) as process:
        wait_until(
            lambda: len(metrics(run)) > 2, 120.0, lambda: log.read_text() if process.poll() is not None else None
        )
        yield process


def test_ranks_that_get_sigterm_save_and_torchrun_restarts_them_where_they_were(
    tiny_model: Path, url: str, tmp_path: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "output.log"
    # Every other step is saved already when the signal comes, or is being written.
    saving = {"every_steps": 2, "asynchronous": True, "preemption_grace_seconds": 120}
    config = settings(tiny_model, run, url, num_steps=1000, checkpoint=saving, parallel=TWO_RANKS)
    command = torchrun(config, tmp_path, "--max-restarts=1")
    with run_after_two_steps(command, run, log) as process:
        ranks = [number for number in descendants(process.pid) if is_rank(number)]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGTERM)  # one is enough: of a job on several nodes, one may be taken away
        wait_until(lambda: not alive(ranks), 150.0)
        # torchrun starts new ones, which take a while to make another step.
        step = newest_checkpoint(run)
        assert f"ended by SIGTERM after step {step}, which is saved" in log.read_text()
        assert metrics(run)[-1]["step"] == step, "the step that was being made is the last one"

        wait_until(lambda: len(metrics(run)) > step + 3, 120.0, lambda: log.read_text() if process.poll() else None)
        everything = descendants(process.pid)
        process.terminate()
        assert process.wait(scaled(60.0)) != 0
        wait_until(lambda: not alive(everything), 20.0)
    output = log.read_text()
    assert f"resumed: step {step} is published again" in output
    steps = [row["step"] for row in metrics(run)]
    assert steps == list(range(len(steps))), "no step is missing, and none is there twice"
    assert f"ended by SIGTERM after step {steps[-1]}, which is saved" in output
    assert newest_checkpoint(run) == steps[-1]
    assert "error on rank" not in output


def test_without_checkpoints_a_sigterm_ends_the_run_at_once(tiny_model: Path, url: str, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "output.log"
    config = settings(tiny_model, run, url, num_steps=1000, checkpoint={"every_steps": 0}, parallel=TWO_RANKS)
    with run_after_two_steps(torchrun(config, tmp_path), run, log) as process:
        everything = descendants(process.pid)
        process.terminate()
        assert process.wait(scaled(60.0)) != 0
        wait_until(lambda: not alive(everything), 20.0)
    assert "ended by SIGTERM, with everything that the run had started" in log.read_text()


def newest_checkpoint(run: Path) -> int:
    """Its step."""
    (newest, *_) = checkpoint_folders(run / "checkpoints")
    check(newest)
    return int(newest.name.removeprefix("step_"))


def is_rank(process_id: int) -> bool:
    return b"megatron_a3po\0train" in Path(f"/proc/{process_id}/cmdline").read_bytes()


def test_a_named_checkpoint_that_is_not_there_is_an_error_before_anything_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = settings(
        tiny_model, tmp_path / "run", "http://127.0.0.1:9", resume=str(tmp_path / "nowhere"), parallel=TWO_RANKS
    )
    code, output = run_to_end(torchrun(config, tmp_path), tmp_path / "output.log", 120.0)

    assert code != 0 and f"error: resume = {tmp_path / 'nowhere'}: " in output and "no such folder" in output
    assert not (tmp_path / "run" / "config.resolved.yaml").exists()

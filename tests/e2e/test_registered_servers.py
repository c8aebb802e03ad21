"""Servers that the launcher has started, with a key: a run finds them, loses one, and gets it back."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_a3po.rollout.registration import Registration, read_registrations
from tests.e2e.conftest import SERVER_START_SECONDS
from tests.e2e.runs import alive, get, metrics, started, torchrun, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

KEY = "5ec2e7-of-this-run"
STEP_SECONDS = 120.0


def test_a_run_finds_registered_servers_and_takes_one_back_that_its_launcher_has_started_again(
    model: Path, tmp_path: Path
) -> None:
    run_dir, key_file = tmp_path / "run", tmp_path / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(KEY)
    settings = {"model": model, "run_dir": run_dir, "rollout.servers": "registered", "rollout.num_servers": 2}
    settings |= {"rollout.key_file": key_file, "publish.min_servers": 1, "num_steps": 10_000}
    settings |= {"parallel.tensor": 1, "parallel.pipeline": 1, "data.num_held_out": 8, "evaluation.every_steps": 0}
    settings |= {"checkpoint.every_steps": 0, "rollout.start_timeout_seconds": 2 * SERVER_START_SECONDS}
    overrides = [f"{name}={value}" for name, value in settings.items()]
    launcher_log, run_log = tmp_path / "launcher.log", tmp_path / "run.log"
    program = [sys.executable, "tools/launch_rollout_servers.py", "--config", "configs/tiny_cpu.yaml", "--number", "2"]

    def registered() -> list[Registration]:
        return read_registrations(run_dir / "servers")

    # The run comes first, and waits.
    with (
        started(torchrun(*overrides, ranks=1), run_log) as run,
        started([*program, *overrides], launcher_log) as launch,
    ):

        def problem() -> str | None:
            ended = [log for log, process in ((run_log, run), (launcher_log, launch)) if process.poll() is not None]
            return "".join(log.read_text(errors="replace") for log in ended) or None

        def healthy(number: int) -> bool:
            return bool(rows := metrics(run_dir)) and rows[-1]["servers_healthy"] == number

        wait_until(lambda: len(registered()) == 2, 2 * SERVER_START_SECONDS, problem)
        wait_until(lambda: healthy(2), STEP_SECONDS, problem)
        first, second = registered()
        assert [get(f"{item.url}/server_info")[0] for item in (first, second)] == [401, 401]
        assert KEY not in processes()

        os.kill(second.process_id, signal.SIGKILL)
        wait_until(lambda: healthy(1), STEP_SECONDS, problem)
        wait_until(lambda: len(registered()) == 2, SERVER_START_SECONDS, problem)
        again = next(item for item in registered() if item.url == second.url)
        assert again.process_id != second.process_id
        wait_until(lambda: healthy(2), STEP_SECONDS, problem)
        assert metrics(run_dir)[-1]["server_resyncs"] == 1

        launch.send_signal(signal.SIGTERM)
        assert launch.wait(30.0) == 0
        assert registered() == []
        assert alive([first.process_id, again.process_id]) == []

    waited = f"waiting for rollout servers that register in {run_dir / 'servers'}: 0 of 2 answer"
    assert waited in run_log.read_text()
    assert files_with(KEY, tmp_path) == [key_file]


def processes() -> str:
    """The command lines of all processes, as everybody sees them."""
    return subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]

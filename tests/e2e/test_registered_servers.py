"""Servers that launchers have started, with a key, before and during a run."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_a3po.serving.registry import Registration, read_registrations
from tests.e2e.conftest import SERVER_START_SECONDS
from tests.e2e.runs import alive, get, metrics, started, torchrun, wait_until
from tests.support.deadlines import scaled

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1500)]

KEY = "5ec2e7-of-this-run"
STEP_SECONDS = 120.0


def test_a_run_finds_a_server_gets_another_one_loses_it_and_takes_it_back(model: Path, tmp_path: Path) -> None:
    run_dir, key_file = tmp_path / "run", tmp_path / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(KEY)
    settings = {"model": model, "run_dir": run_dir, "num_steps": 10_000, "rollout.servers": "registered"}
    settings |= {"rollout.key_file": key_file, "rollout.start_timeout_seconds": 2 * SERVER_START_SECONDS}
    settings |= {"parallel.tensor": 1, "parallel.pipeline": 1, "data.num_held_out": 8, "evaluation.every_steps": 0}
    settings |= {"checkpoint.every_steps": 0}
    overrides = [f"{name}={value}" for name, value in settings.items()]
    launch = [sys.executable, "tools/launch_rollout_servers.py", "--config", "configs/tiny_cpu.yaml", *overrides]
    logs = {name: tmp_path / f"{name}.log" for name in ("run", "first", "second")}

    def registered() -> list[Registration]:
        return read_registrations(run_dir / "servers")

    def healthy(number: int) -> bool:
        return bool(rows := metrics(run_dir)) and rows[-1]["servers_healthy"] == number

    with ExitStack() as stack:
        processes = {"run": stack.enter_context(started(torchrun(*overrides, ranks=1), logs["run"]))}

        def problem() -> str | None:
            ended = [logs[name] for name, process in processes.items() if process.poll() is not None]
            return "".join(log.read_text(errors="replace") for log in ended) or None

        # The run waits for the first server, and takes in the second one when it comes.
        processes["first"] = stack.enter_context(started(launch, logs["first"]))
        wait_until(lambda: healthy(1), SERVER_START_SECONDS + STEP_SECONDS, problem)
        (first,) = registered()
        processes["second"] = stack.enter_context(started(launch, logs["second"]))
        wait_until(lambda: healthy(2), SERVER_START_SECONDS + STEP_SECONDS, problem)
        (second,) = [item for item in registered() if item != first]
        assert [get(f"{item.url}/server_info")[0] for item in (first, second)] == [401, 401]
        assert KEY not in command_lines()

        # The second one is killed, started again at the same address, and taken back.
        os.kill(second.process_id, signal.SIGKILL)
        wait_until(lambda: healthy(1), STEP_SECONDS, problem)
        wait_until(lambda: healthy(2), SERVER_START_SECONDS + STEP_SECONDS, problem)
        (again,) = [item for item in registered() if item != first]
        assert again.url == second.url and again.process_id != second.process_id
        assert metrics(run_dir)[-1]["server_resyncs"] == 2

        for name in ("second", "first"):
            processes[name].send_signal(signal.SIGTERM)
            assert processes[name].wait(scaled(30.0)) == 0
        assert registered() == []
        assert alive([first.process_id, again.process_id]) == []

    waited = f"waiting for rollout servers that register in {run_dir / 'servers'}: 0 of 1 answer"
    assert waited in logs["run"].read_text()
    assert files_with(KEY, tmp_path) == [key_file]


def command_lines() -> str:
    """The command lines of all processes, as everybody sees them."""
    return subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]

"""A local server's processes: none outlives the run. The command is a harmless one instead of SGLang."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_a3po.runtime.processes import group_members
from megatron_a3po.serving import local_server as servers_module
from megatron_a3po.serving.local_server import LocalServer
from tests.support.paths import ROOT

# A server whose child ignores SIGTERM; both write their process ids into the file named by the first argument.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(60)
"""


def make_server(tmp_path: Path, program: str, *arguments: str) -> LocalServer:
    command = [sys.executable, "-c", program, *arguments]
    return LocalServer(tmp_path / "model", tmp_path / "server.log", make_command=lambda _: command)


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "the deadline passed"
        time.sleep(0.02)


def written_ids(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def is_running(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_end_of_the_block_ends_all_processes_at_once_also_those_that_ignore_sigterm(tmp_path: Path) -> None:
    ids_file = tmp_path / "ids"
    with make_server(tmp_path, STUBBORN, str(ids_file)):
        wait_until(lambda: len(written_ids(ids_file)) == 2)
        ids = written_ids(ids_file)
        assert all(is_running(id) for id in ids)
        start = time.monotonic()

    assert time.monotonic() - start < 8.0, "less than what it waits for processes that do not end"
    assert not any(is_running(id) for id in ids)


def test_processes_that_outlive_a_killed_server_are_ended_too(tmp_path: Path) -> None:
    ids_file = tmp_path / "ids"
    with make_server(tmp_path, STUBBORN, str(ids_file)) as server:
        wait_until(lambda: len(written_ids(ids_file)) == 2)
        ids = written_ids(ids_file)
        os.kill(server.process_id, signal.SIGKILL)
        wait_until(lambda: server.describe_death() is not None)

    assert not any(is_running(id) for id in ids)


def test_the_end_of_the_block_is_quiet_when_the_server_has_ended_by_itself(tmp_path: Path) -> None:
    with make_server(tmp_path, "pass") as server:
        wait_until(lambda: server.describe_death() is not None)


def test_an_exception_in_the_block_ends_the_server_and_passes_through(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), make_server(tmp_path, "import time; time.sleep(60)") as server:
        raise KeyError("mine")

    assert not is_running(server.process_id)


def test_the_death_of_a_server_is_described_by_exit_code_with_its_log(tmp_path: Path) -> None:
    with make_server(tmp_path, "print('no memory', flush=True); raise SystemExit(3)") as server:
        wait_until(lambda: server.describe_death() is not None)

        assert server.describe_death() == (
            f"the rollout server (process {server.process_id}) ended with exit code 3; its log is {server.log_file}"
        )
    assert "no memory" in server.log_file.read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_death_of_a_server_is_described_by_signal(tmp_path: Path, number: signal.Signals) -> None:
    with make_server(tmp_path, "import time; time.sleep(60)") as server:
        assert server.describe_death() is None
        os.kill(server.process_id, number)
        wait_until(lambda: server.describe_death() is not None)

        assert f"was killed by {number.name};" in str(server.describe_death())


def test_a_server_that_was_not_started_is_not_dead(tmp_path: Path) -> None:
    assert make_server(tmp_path, "pass").describe_death() is None


def test_a_server_dies_with_a_run_that_is_killed(tmp_path: Path) -> None:
    id_file = tmp_path / "id"
    run = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from megatron_a3po.serving.local_server import LocalServer

        def command(server):
            return [sys.executable, "-c", "import time; time.sleep(60)"]

        with LocalServer(Path("model"), Path({str(tmp_path / "server.log")!r}), make_command=command) as server:
            Path({str(id_file)!r}).write_text(str(server.process_id))
            time.sleep(60)
    """)
    process = subprocess.Popen([sys.executable, "-c", run], env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        wait_until(lambda: bool(written_ids(id_file)), timeout_seconds=20.0)
        (server_id,) = written_ids(id_file)
        assert is_running(server_id)
    finally:
        process.kill()
        process.wait()

    wait_until(lambda: not is_running(server_id), timeout_seconds=20.0)


# An SGLang whose import starts a process that does not end with its parent; both write their process ids down.
SLOW_IMPORT = """
import os, sys, time
os.fork()
with open({ids!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
time.sleep(60)
"""


@pytest.mark.parametrize("killed", ["the run", "the server"])
def test_processes_of_a_server_that_is_still_importing_end_with_it(tmp_path: Path, killed: str) -> None:
    ids_file = tmp_path / "ids"
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text(SLOW_IMPORT.format(ids=str(ids_file)))
    run = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from megatron_a3po.serving.local_server import LocalServer

        with LocalServer(Path("model"), Path({str(tmp_path / "server.log")!r})) as server:
            Path({str(tmp_path / "id")!r}).write_text(str(server.process_id))
            time.sleep(60)
    """)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    process = subprocess.Popen([sys.executable, "-c", run], env=environment)
    try:
        wait_until(lambda: len(written_ids(ids_file)) == 2, timeout_seconds=30.0)
        (server_id,) = written_ids(tmp_path / "id")
        ids = [member.pid for member in group_members(server_id)]
        assert {server_id, *written_ids(ids_file)} < set(ids), "the server, its process, and the watchdog of both"
        os.kill(process.pid if killed == "the run" else server_id, signal.SIGKILL)
        wait_until(lambda: not any(is_running(id) for id in ids), timeout_seconds=20.0)
    finally:
        process.kill()
        process.wait()


def test_a_watchdog_ends_also_those_that_ignore_sigterm_and_is_ended_by_nothing_less(tmp_path: Path) -> None:
    program = f"from megatron_a3po.runtime.processes import start_watchdog; start_watchdog(){STUBBORN}"
    with make_server(tmp_path, program, str(tmp_path / "ids")) as server:
        wait_until(lambda: len(written_ids(tmp_path / "ids")) == 2)
        ids = [member.pid for member in group_members(server.process_id)]
        os.killpg(server.process_id, signal.SIGTERM)
        assert len(ids) == 3 and all(is_running(id) for id in ids)
        os.kill(server.process_id, signal.SIGKILL)
        wait_until(lambda: not any(is_running(id) for id in ids), timeout_seconds=20.0)


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(tmp_path: Path) -> None:
    with make_server(tmp_path, "import time; time.sleep(60)") as server:
        assert os.getpgid(server.process_id) == server.process_id != os.getpgrp()


def test_the_end_does_not_wait_for_ended_processes_that_nobody_collects(tmp_path: Path) -> None:
    # In a container whose first process collects no orphans they stay as zombies; here a subreaper plays that part.
    run = textwrap.dedent(f"""
        import ctypes, sys, time
        from pathlib import Path
        from megatron_a3po.serving.local_server import LocalServer

        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ids = Path({str(tmp_path / "ids")!r})

        def command(server):
            return [sys.executable, "-c", {STUBBORN!r}, str(ids)]

        with LocalServer(Path("model"), Path({str(tmp_path / "server.log")!r}), make_command=command):
            while not ids.exists() or len(ids.read_text().split()) < 2:
                time.sleep(0.02)
    """)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    subprocess.run([sys.executable, "-c", run], env=environment, timeout=20.0, check=True)

    assert not any(is_running(id) for id in written_ids(tmp_path / "ids"))


# Writes down what it was started with.
WITNESS = """
import json, os, sys
with open(sys.argv[1] + ".part", "w") as file:
    json.dump({"arguments": sys.argv[2:], "environment": dict(os.environ)}, file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


def start_of(
    tmp_path: Path, gpus: list[str] | None, *arguments: str, key: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """SGLang's arguments and environment."""
    file = tmp_path / "start"

    def witness(server: LocalServer) -> list[str]:
        return [sys.executable, "-c", WITNESS, str(file), *servers_module._sglang_command(server)]

    log = tmp_path / "server.log"
    with LocalServer(
        tmp_path / "model", log, arguments, gpus=gpus, host="127.0.0.2", port=31234, key=key, make_command=witness
    ) as server:
        assert server.url == "http://127.0.0.2:31234"
        wait_until(file.exists)
    start = json.loads(file.read_text())
    return start["arguments"], start["environment"]


def test_on_gpus_a_server_sees_its_own_and_nothing_of_the_cpus_stand_ins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command, environment = start_of(tmp_path, ["4", "5"], "--tp-size", "2")

    assert command == [
        *(sys.executable, "-m", "megatron_a3po.serving.entrypoint", "--model-path", str(tmp_path / "model")),
        *("--host", "127.0.0.2", "--port", "31234", "--enable-priority-scheduling", "--tp-size", "2"),
    ]
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert not any(name in environment for name in ("PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "SGLANG_NCCL_SO_PATH"))


def test_on_the_cpu_a_server_sees_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    command, environment = start_of(tmp_path, None)

    assert command[command.index("--device") + 1] == "cpu"
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["SGLANG_USE_CPU_ENGINE"]) == ("", "1")


def test_the_key_is_in_the_environment_of_a_server_that_asks_for_it_and_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, environment = start_of(tmp_path, None, key="5ec2e7")
    assert environment["A3PO_SERVER_KEY"] == "5ec2e7"
    assert "5ec2e7" not in " ".join(command)

    monkeypatch.setenv("A3PO_SERVER_KEY", "5ec2e7")
    (tmp_path / "start").unlink()
    assert "A3PO_SERVER_KEY" not in start_of(tmp_path, None)[1]


def test_a_megatron_folder_is_served_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--load-format" not in start_of(tmp_path, None)[0]
    (tmp_path / "start").unlink()
    monkeypatch.setattr(servers_module, "has_megatron_weights", lambda folder: folder == tmp_path / "model")
    command, _ = start_of(tmp_path, None)
    assert command[command.index("--load-format") + 1] == "dummy"

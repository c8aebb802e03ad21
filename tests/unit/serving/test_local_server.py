"""A local server's processes: none outlives the run. The command is a harmless one instead of SGLang."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_end_of_the_block_ends_all_processes_at_once_also_those_that_ignore_sigterm_or_outlive_a_killed_server(
    tmp_path: Path, is_killed: bool
) -> None:
    ids_file = tmp_path / "ids"
    server = make_server(tmp_path, STUBBORN, str(ids_file))
    assert server.describe_death() is None
    with server:
        wait_until(lambda: len(written_ids(ids_file)) == 2)
        ids = written_ids(ids_file)
        assert all(is_running(id) for id in ids) and server.describe_death() is None
        assert os.getpgid(server.process_id) == server.process_id != os.getpgrp(), "Ctrl-C does not reach it"
        if is_killed:
            os.kill(server.process_id, signal.SIGKILL)
            wait_until(lambda: server.describe_death() is not None)
        start = time.monotonic()
    assert time.monotonic() - start < 8.0, "less than what it waits for processes that do not end"
    assert not any(is_running(id) for id in ids)


def test_an_exception_in_the_block_ends_the_server_and_passes_through(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), make_server(tmp_path, "import time; time.sleep(60)") as server:
        raise KeyError("mine")
    assert not is_running(server.process_id)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
    ],
)
def test_the_death_of_a_server_is_described_with_its_log(tmp_path: Path, end: str, words: str) -> None:
    with make_server(tmp_path, f"import os; print('no memory', flush=True); {end}") as server:
        wait_until(lambda: server.describe_death() is not None)
        told = f"the rollout server (process {server.process_id}) {words}; its log is {server.log_file}"
        assert server.describe_death() == told
    assert "no memory" in server.log_file.read_text()


RUN = """
import time
from pathlib import Path
from megatron_a3po.serving.local_server import LocalServer

with LocalServer(Path("model"), Path({folder!r}, "server.log")) as server:
    Path({folder!r}, "id").write_text(str(server.process_id))
    time.sleep(60)
"""


def end_while_it_imports(folder: Path, *, by_its_run: bool) -> None:
    """Its SGLang starts a process at its import that does not end with its parent, and both ignore SIGTERM."""
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").write_text(STUBBORN.replace("sys.argv[1]", repr(str(folder / "ids"))))
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    process = subprocess.Popen([sys.executable, "-c", RUN.format(folder=str(folder))], env=environment)
    try:
        wait_until(lambda: len(written_ids(folder / "ids")) == 2)
        (server_id,) = written_ids(folder / "id")
        ids = [member.pid for member in group_members(server_id)]
        assert {server_id, *written_ids(folder / "ids")} < set(ids) and len(ids) == 3, "a watchdog looks after both"
        os.killpg(server_id, signal.SIGTERM)
        assert all(is_running(id) for id in ids), "nothing less than SIGKILL ends the watchdog"
        os.kill(process.pid if by_its_run else server_id, signal.SIGKILL)
        wait_until(lambda: not any(is_running(id) for id in ids))
    finally:
        process.kill()
        process.wait()


def test_all_processes_end_with_server_or_run_while_it_imports_and_when_they_ignore_sigterm(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:  # at one time, since most of it is waiting
        with_run = pool.submit(end_while_it_imports, tmp_path / "run", by_its_run=True)
        end_while_it_imports(tmp_path / "server", by_its_run=False)
        with_run.result()


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
    file, log = tmp_path / "start", tmp_path / "server.log"
    file.unlink(missing_ok=True)

    def witness(server: LocalServer) -> list[str]:
        return [sys.executable, "-c", WITNESS, str(file), *servers_module._sglang_command(server)]

    with LocalServer(
        tmp_path / "model", log, arguments, gpus=gpus, host="127.0.0.2", port=31234, key=key, make_command=witness
    ) as server:
        assert server.url == "http://127.0.0.2:31234"
        wait_until(file.exists)
    start = json.loads(file.read_text())
    return start["arguments"], start["environment"]


OF_THE_RUN = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "A3PO_SERVER_KEY")


@pytest.fixture
def environment_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes logprobs others or is for ranks, the run's key and GPUs, and a variable that is passed on."""
    for name in (*OF_THE_RUN, "PASSED_ON"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.mark.usefixtures("environment_of_the_run")
def test_on_gpus_a_server_sees_its_own_and_nothing_of_the_cpus_stand_ins_or_of_the_run(tmp_path: Path) -> None:
    command, environment = start_of(tmp_path, ["4", "5"], "--tp-size", "2")
    assert command == [
        *(sys.executable, "-m", "megatron_a3po.serving.entrypoint", "--model-path", str(tmp_path / "model")),
        *("--host", "127.0.0.2", "--port", "31234", "--enable-priority-scheduling", "--tp-size", "2"),
    ]
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5" and environment["PASSED_ON"] == "1"
    others = {"PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "SGLANG_NCCL_SO_PATH", *OF_THE_RUN}
    assert not others & environment.keys()


@pytest.mark.usefixtures("environment_of_the_run")
def test_on_the_cpu_a_server_sees_no_gpu_nor_what_is_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, environment = start_of(tmp_path, None)
    assert command[command.index("--device") + 1] == "cpu" and "--load-format" not in command
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["SGLANG_USE_CPU_ENGINE"]) == ("", "1")
    assert environment["PASSED_ON"] == "1" and not environment.keys() & set(OF_THE_RUN)

    monkeypatch.setattr(servers_module, "has_megatron_weights", lambda folder: folder == tmp_path / "model")
    command, _ = start_of(tmp_path, None)
    assert command[command.index("--load-format") + 1] == "dummy", "what Megatron holds, a server cannot read"


def test_the_key_is_in_the_environment_of_a_server_that_asks_for_it_and_on_no_command_line(tmp_path: Path) -> None:
    command, environment = start_of(tmp_path, None, key="5ec2e7")
    assert environment["A3PO_SERVER_KEY"] == "5ec2e7"
    assert "5ec2e7" not in " ".join(command)

"""The launcher of rollout nodes keeps its servers running and registered. Small HTTP servers stand in for SGLang."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_a3po.config import DataConfig, RolloutConfig, RunConfig
from megatron_a3po.errors import ConfigError, RolloutError
from megatron_a3po.serving import launcher
from megatron_a3po.serving.launcher import KeptServer, check_host, keep_running, server_maker, share_gpus
from megatron_a3po.serving.local_server import LocalServer
from megatron_a3po.serving.registry import Registration, read_registrations
from tests.support.paths import ROOT
from tests.unit.serving.test_local_server import is_running, wait_until

KEY = "5ec2e7-of-this-run"

# Arguments: port, whether it asks for its key.
SERVER = """
import http.server, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        key = os.environ.get("A3PO_SERVER_KEY") if sys.argv[2] == "True" else None
        allowed = key is None or self.path == "/ready" or self.headers["Authorization"] == f"Bearer {key}"
        self.send_response(200 if allowed else 401)
        self.end_headers()

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Launch:
    """One kept server in this process, looked at when a test says so."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        program: str = SERVER,
        key: str | None = None,
        asks: bool = True,
        start_timeout_seconds: float = 30.0,
    ) -> None:
        self.said: list[str] = []
        self.log = tmp_path / "server.log"
        self.servers: list[LocalServer] = []
        rollout = RolloutConfig(servers="registered", start_timeout_seconds=start_timeout_seconds)
        config = RunConfig(
            model=Path("models/x"),
            run_dir=tmp_path / "run",
            num_steps=1,
            data=DataConfig(task="spell_backward"),
            rollout=rollout,
        )

        def make(port: int | None) -> LocalServer:
            server = LocalServer(
                config.model,
                self.log,
                port=port,
                key=key,
                make_command=lambda server: [sys.executable, "-c", program, str(server.port), str(asks)],
            )
            self.servers.append(server)
            return server

        self.folder = config.run_dir / "servers"
        self.kept = KeptServer(make, config, key=key, say=self.said.append)

    @property
    def registered(self) -> list[Registration]:
        return read_registrations(self.folder)

    def look_until_registered(self) -> Registration:
        def look() -> bool:
            self.kept.look()
            return bool(self.registered)

        wait_until(look)
        (registration,) = self.registered
        return registration

    def kill(self) -> None:
        server = self.servers[-1]
        os.kill(server.process_id, signal.SIGKILL)
        wait_until(lambda: server.describe_death() is not None)


@pytest.mark.parametrize("key", [None, KEY])
def test_a_server_is_registered_while_it_answers_and_gone_at_the_end(tmp_path: Path, key: str | None) -> None:
    launch = Launch(tmp_path, key=key)
    with launch.kept:
        assert launch.registered == []
        registration = launch.look_until_registered()
        (server,) = launch.servers
        assert registration.model_dump(exclude={"started_at"}) == {
            "url": server.url,
            "model": "models/x",
            "tensor_parallel": 1,
            "host": socket.gethostname(),
            "process_id": server.process_id,
        }
    assert launch.registered == []
    assert not is_running(registration.process_id)
    assert f"the rollout server at {server.url} is ready: models/x, on the CPU" in launch.said
    assert KEY not in "".join(launch.said) + registration.model_dump_json() + launch.log.read_text()


def test_a_server_that_is_killed_is_taken_back_started_at_its_address_and_registered_again(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    with launch.kept:
        before = launch.look_until_registered()
        launch.kill()
        launch.kept.look()
        assert launch.registered == []
        after = launch.look_until_registered()

    assert after.url == before.url
    assert after.process_id == launch.servers[1].process_id != before.process_id
    message = f"the rollout server (process {before.process_id}) was killed by SIGKILL; its log is {launch.log}; it is"
    assert f"{message} started again" in launch.said


def test_where_its_address_is_taken_it_gets_another_one(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    with launch.kept:
        before = launch.look_until_registered()
        launch.kill()
        with socket.create_server(("127.0.0.1", launch.servers[0].port)):
            launch.kept.look()
            after = launch.look_until_registered()

    assert after.url == launch.servers[1].url != before.url
    assert launch.registered == []


def test_a_server_that_ends_again_and_again_is_given_up(tmp_path: Path) -> None:
    launch = Launch(tmp_path, program="raise SystemExit(3)")

    assert keep_running([launch.kept], threading.Event()) is False
    assert len(launch.servers) == 1 + launcher.MAX_RESTARTS
    assert f"ended with exit code 3; its log is {launch.log}; it is given up after 3 restarts" in launch.said[-1]


def test_one_that_is_given_up_leaves_the_others_alone(tmp_path: Path) -> None:
    bad, good = Launch(tmp_path, program="raise SystemExit(3)"), Launch(tmp_path)
    stop = threading.Event()

    def end_when_given_up() -> None:
        while not (bad.kept.is_given_up and good.registered):
            time.sleep(0.02)
        stop.set()

    threading.Thread(target=end_when_given_up, daemon=True).start()
    assert keep_running([bad.kept, good.kept], stop) is True
    assert len(good.servers) == 1


def test_restarts_long_ago_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "RESTART_WINDOW_SECONDS", 0.0)
    launch = Launch(tmp_path, program="raise SystemExit(3)")
    with launch.kept:
        for _ in range(2 * launcher.MAX_RESTARTS):
            launch.kill()
            launch.kept.look()
        assert not launch.kept.is_given_up


def test_a_server_that_does_not_become_ready_is_started_again(tmp_path: Path) -> None:
    launch = Launch(tmp_path, program="import time; time.sleep(60)", start_timeout_seconds=0.01)
    with launch.kept:
        wait_until(lambda: launch.kept.look() or len(launch.servers) == 2)
        assert not is_running(launch.servers[0].process_id)

    assert "is not ready within rollout.start_timeout_seconds = 0.01; its log is" in launch.said[1]


def test_a_server_that_answers_without_the_key_is_ended_and_never_registered(tmp_path: Path) -> None:
    launch = Launch(tmp_path, key=KEY, asks=False)
    with pytest.raises(RolloutError, match="answers without the key"), launch.kept:
        launch.look_until_registered()

    assert not (launch.folder.exists() and launch.registered)
    assert not is_running(launch.servers[0].process_id)


# The program as a user starts it, with the stand-in for SGLang.
PROGRAM = """
import runpy, sys
from megatron_a3po.serving.local_server import LocalServer

LocalServer.__init__.__kwdefaults__["make_command"] = lambda server: [
    sys.executable, "-c", {server!r}, str(server.port), "True"
]
sys.argv = ["launch_rollout_servers.py", *{arguments!r}]
sys.path.insert(0, {root!r})
runpy.run_path({root!r} + "/tools/launch_rollout_servers.py", run_name="__main__")
"""


def command(tmp_path: Path, *arguments: str) -> list[str]:
    values = {"rollout.servers": "registered", "run_dir": tmp_path / "run", "model": model_folder(tmp_path)}
    overrides = [f"{name}={value}" for name, value in values.items()]
    all_arguments = ["--config", str(ROOT / "configs" / "tiny_cpu.yaml"), *arguments[:2], *overrides, *arguments[2:]]
    return [sys.executable, "-c", PROGRAM.format(server=SERVER, arguments=all_arguments, root=str(ROOT))]


def model_folder(tmp_path: Path) -> Path:
    """As much of a model as is looked at before servers start."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    sizes = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": 4, "max_position_embeddings": 100, "vocab_size": 259}
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **sizes}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    save_file({"weight": np.zeros(3)}, folder / "model.safetensors")
    return folder


@contextmanager
def launched(tmp_path: Path, number: int) -> Iterator[tuple["subprocess.Popen[bytes]", list[Registration]]]:
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command(tmp_path, "--number", str(number)),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"A3PO_SERVER_KEY": KEY},
        )
    try:

        def all_ready() -> bool:
            assert process.poll() is None, output.read_text()
            return output.read_text().count(" is ready: ") == number

        wait_until(all_ready, timeout_seconds=60.0)
        yield process, read_registrations(tmp_path / "run" / "servers")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_ends_all_servers_and_takes_their_registrations_back(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path, 2) as (process, registrations):
        process.send_signal(number)
        assert process.wait(timeout=60.0) == 0

    assert read_registrations(tmp_path / "run" / "servers") == []
    assert not any(is_running(item.process_id) for item in registrations)
    said = (tmp_path / "output").read_text()
    assert all(f"the rollout server at {item.url} is ready" in said for item in registrations)
    logs = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert logs == {f"rollout_server_127.0.0.1_{item.url.rsplit(':')[-1]}.log" for item in registrations}
    assert KEY not in said


def test_servers_die_with_a_launcher_that_is_killed_and_the_next_one_takes_their_registrations_back(
    tmp_path: Path,
) -> None:
    with launched(tmp_path, 1) as (process, (before,)):
        process.kill()
        process.wait()
        wait_until(lambda: not is_running(before.process_id))
    assert read_registrations(tmp_path / "run" / "servers") == [before]

    (tmp_path / "run" / "servers" / "torn.json").write_text("{")
    with launched(tmp_path, 1) as (_, (after,)):
        assert after.url != before.url
    assert f"{before.url} was still registered" in (tmp_path / "output").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: give the one address of this machine"),
        (["--gpus", "0,1"], "--gpus: `device: cpu` starts servers on the CPU; give --number"),
        (["--number", "1", "rollout.servers=local"], "rollout.servers = 'local': the run would not look for these"),
        (["--number", "1", "rollout.server_arguments=[--api-key, x]"], "set `rollout.key_file` or A3PO_SERVER_KEY"),
    ],
)
def test_mistakes_are_told_before_anything_starts(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run(command(tmp_path, *arguments), capture_output=True, text=True, timeout=60.0)

    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_address_that_others_reach_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, *_: object) -> list[tuple[object, ...]]:
        addresses = {"node7": "10.0.0.7", "debian": "127.0.1.1", "localhost": "127.0.0.1"}
        return [(socket.AF_INET, 0, 0, "", (addresses.get(host, host), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_server", lambda address: nullcontext())

    for host in ("127.0.0.1", "127.0.1.1", "localhost"):
        check_host(host, None)
    for host in ("10.0.0.7", "node7"):
        check_host(host, KEY)
        with pytest.raises(ConfigError, match=r"without a key, everybody.*openssl rand -hex 32.*A3PO_SERVER_KEY"):
            check_host(host, None)
    with pytest.raises(ConfigError, match="give the one address"):
        check_host("0.0.0.0", KEY)
    with pytest.raises(ConfigError, match=r"--host debian: is 127.0.1.1 on this machine, which no other one reaches"):
        check_host("debian", KEY)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1: no IPv4 address or name of this machine"):
        check_host("192.0.2.1", KEY)


def test_servers_say_where_their_model_lies_wherever_they_are_asked_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig(
        model=Path("models/x"),
        run_dir=Path("run"),
        num_steps=1,
        data=DataConfig(task="spell_backward"),
        rollout=RolloutConfig(max_new_tokens=8),
    )
    server = server_maker(config, gpus=None, host="127.0.0.1", key=None)(None)
    assert server.model == tmp_path / "models" / "x"


def test_gpus_are_shared_among_servers_in_order() -> None:
    assert share_gpus(["4", "5", "6", "7"], 2) == [["4", "5"], ["6", "7"]]
    assert share_gpus(["0"], 1) == [["0"]]
    for gpus in ([], ["4", "5", "6"]):
        with pytest.raises(ConfigError, match=r"rollout.server_tensor_parallel = 2; give a multiple of 2 as --gpus"):
            share_gpus(gpus, 2)

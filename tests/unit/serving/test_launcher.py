"""The launcher of rollout nodes keeps its servers running and registered. Small HTTP servers stand in for SGLang."""

import json
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

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
from tests.support.receiver import FORKED
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


def config_of(run_dir: Path, **rollout: Any) -> RunConfig:
    data = DataConfig(task="spell_backward")
    return RunConfig(
        model=Path("models/x"), run_dir=run_dir, num_steps=1, data=data, rollout=RolloutConfig.model_validate(rollout)
    )


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
        tmp_path.mkdir(exist_ok=True)
        self.said: list[str] = []
        self.log = tmp_path / "server.log"
        self.servers: list[LocalServer] = []
        config = config_of(tmp_path / "run", servers="registered", start_timeout_seconds=start_timeout_seconds)

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


def test_a_killed_server_is_taken_back_started_at_its_address_if_free_and_registered_again(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    with launch.kept:
        before = launch.look_until_registered()
        launch.kill()
        launch.kept.look()
        assert launch.registered == []
        after = launch.look_until_registered()
        launch.kill()
        with socket.create_server(("127.0.0.1", launch.servers[0].port)):
            launch.kept.look()
            elsewhere = launch.look_until_registered()
    assert after.url == before.url and after.process_id == launch.servers[1].process_id != before.process_id
    assert elsewhere.url == launch.servers[2].url != after.url
    told = f"the rollout server (process {before.process_id}) was killed by SIGKILL; its log is {launch.log}; it is"
    assert f"{told} started again" in launch.said
    assert launch.registered == []


def test_a_server_that_ends_again_and_again_is_given_up_and_leaves_the_others_alone(tmp_path: Path) -> None:
    alone, bad = (Launch(tmp_path / name, program="raise SystemExit(3)") for name in ("alone", "bad"))
    good = Launch(tmp_path / "good")
    stop = threading.Event()

    def end_when_given_up() -> None:
        try:
            wait_until(lambda: alone.kept.is_given_up and bad.kept.is_given_up and bool(good.registered))
        finally:
            stop.set()

    with ThreadPoolExecutor() as pool:
        pool.submit(end_when_given_up)
        lonely = pool.submit(keep_running, [alone.kept], stop)
        assert keep_running([bad.kept, good.kept], stop) is True
        assert lonely.result() is False
    assert len(good.servers) == 1
    for launch in (alone, bad):
        assert len(launch.servers) == 1 + launcher.MAX_RESTARTS
        told = f"ended with exit code 3; its log is {launch.log}; it is given up after 3 restarts"
        assert told in launch.said[-1]


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


def launch(arguments: list[str], output: Path) -> None:
    """The program as a user starts it, with the stand-in for SGLang."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["A3PO_SERVER_KEY"] = KEY
    defaults: Any = LocalServer.__init__.__kwdefaults__
    defaults["make_command"] = lambda server: [sys.executable, "-c", SERVER, str(server.port), "True"]
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def command(folder: Path, *arguments: str) -> list[str]:
    values = {"rollout.servers": "registered", "run_dir": folder / "run", "model": model_folder(folder)}
    overrides = [f"{name}={value}" for name, value in values.items()]
    program = [str(ROOT / "tools" / "launch_rollout_servers.py"), "--config", str(ROOT / "configs" / "tiny_cpu.yaml")]
    return [*program, *arguments[:2], *overrides, *arguments[2:]]


def model_folder(tmp_path: Path) -> Path:
    """As much of a model as is looked at before servers start."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True, parents=True)
    sizes = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": 4, "max_position_embeddings": 100, "vocab_size": 259}
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **sizes}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    save_file({"weight": np.zeros(3)}, folder / "model.safetensors")
    return folder


@contextmanager
def launched(folder: Path, number: int) -> Iterator[tuple[Any, list[Registration]]]:
    """The launcher's process, and its servers when they are ready."""
    arguments, output = command(folder, "--number", str(number)), folder / "output"
    output.write_text("")
    process = FORKED.Process(target=launch, args=(arguments, output))
    process.start()
    try:

        def all_ready() -> bool:
            assert process.is_alive(), output.read_text()
            return output.read_text().count(" is ready: ") == number

        wait_until(all_ready)
        yield process, read_registrations(folder / "run" / "servers")
    finally:
        process.kill()
        process.join()


def end_by_signal(folder: Path, number: signal.Signals) -> None:
    with launched(folder, 2) as (process, registrations):
        os.kill(process.pid, number)
        process.join(60.0)
        assert process.exitcode == 0
    assert read_registrations(folder / "run" / "servers") == []
    assert not any(is_running(item.process_id) for item in registrations)
    said = (folder / "output").read_text()
    assert all(f"the rollout server at {item.url} is ready" in said for item in registrations)
    logs = {path.name for path in (folder / "run" / "logs").iterdir()}
    assert logs == {f"rollout_server_127.0.0.1_{item.url.rsplit(':')[-1]}.log" for item in registrations}
    assert KEY not in said


def test_a_signal_ends_all_servers_and_takes_their_registrations_back(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        list(pool.map(end_by_signal, [tmp_path / number.name for number in numbers], numbers))


def test_servers_die_with_a_killed_launcher_and_the_next_one_takes_their_registrations_back(tmp_path: Path) -> None:
    with launched(tmp_path, 1) as (process, (before,)):
        process.kill()
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
        (["--number", "1", "rollout.servers=local"], "rollout.servers = 'local'"),
        (["--number", "1", "rollout.server_arguments=[--api-key, x]"], "set `rollout.key_file` or A3PO_SERVER_KEY"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", command(tmp_path, *arguments))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_address_that_others_reach_needs_a_key_and_must_be_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1"):
        check_host("192.0.2.1", KEY)

    def resolve(host: str, *_: object) -> list[tuple[object, ...]]:
        addresses = {"node7": "10.0.0.7", "debian": "127.0.1.1", "localhost": "127.0.0.1"}
        return [(socket.AF_INET, 0, 0, "", (addresses.get(host, host), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_server", lambda address: nullcontext())
    for host in ("127.0.0.1", "127.0.1.1", "localhost"):
        check_host(host, None)
    for host in ("10.0.0.7", "node7"):
        check_host(host, KEY)
        with pytest.raises(ConfigError, match=r"openssl rand -hex 32.*A3PO_SERVER_KEY"):
            check_host(host, None)
    with pytest.raises(ConfigError, match="give the one address"):
        check_host("0.0.0.0", KEY)
    with pytest.raises(ConfigError, match=r"--host debian: is 127\.0\.1\.1"):
        check_host("debian", KEY)


def test_servers_say_where_their_model_lies_to_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server = server_maker(config_of(Path("run")), gpus=None, host="127.0.0.1", key=None)(None)
    assert server.model == tmp_path / "models" / "x"


def test_gpus_are_shared_among_servers_in_order() -> None:
    assert share_gpus(["4", "5", "6", "7"], 2) == [["4", "5"], ["6", "7"]]
    assert share_gpus(["0"], 1) == [["0"]]
    for gpus in ([], ["4", "5", "6"]):
        with pytest.raises(ConfigError, match=r"rollout.server_tensor_parallel = 2; give a multiple of 2 as --gpus"):
            share_gpus(gpus, 2)

"""How a run finds the servers that launchers have started elsewhere."""

import asyncio
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.client import SGLangClient
from megatron_a3po.serving.registry import (
    Registration,
    deregister,
    find_servers,
    read_registrations,
    register,
    remove_ended,
)
from tests.support.scripted_server import ScriptedServer
from tests.unit.config.test_server_key import KEY, asks_for_key


def registration(url: str, *, host: str = "node7", process_id: int = 12) -> Registration:
    return Registration(
        url=url,
        model="models/x",
        tensor_parallel=2,
        host=host,
        process_id=process_id,
        started_at="2026-01-02T03:04:05+00:00",
    )


async def find(
    folder: Path,
    number: int,
    *,
    key: str | None = None,
    timeout_seconds: float = 30.0,
    say: Callable[[str], None] = lambda _: None,
) -> list[str]:
    async with aiohttp.ClientSession() as session:
        return await find_servers(
            folder,
            number,
            problem_of=lambda url: SGLangClient(url, session, 10.0, key).problem(),
            timeout_seconds=timeout_seconds,
            say=say,
        )


def test_what_is_registered_is_read_until_it_is_taken_back(tmp_path: Path) -> None:
    folder = tmp_path / "servers"
    first, second = registration("http://10.0.0.7:31000"), registration("http://10.0.0.7:31001")

    assert read_registrations(folder) == []
    register(folder, second)
    register(folder, first)
    assert read_registrations(folder) == [first, second]
    register(folder, first.model_copy(update={"process_id": 13}))
    assert [item.process_id for item in read_registrations(folder)] == [13, 12]
    deregister(folder, first.url)
    deregister(folder, first.url)
    assert read_registrations(folder) == [second]
    assert [file.name for file in folder.iterdir()] == ["10.0.0.7_31001.json"]


def test_files_that_are_no_registrations_are_told_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy is no second server, and what is no file is not waited for."""
    register(tmp_path, registration("http://a:1"))
    shutil.copy(next(tmp_path.iterdir()), tmp_path / "copy.json")
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "torn.json").write_text('{"url": "http://b:2", "mod')
    (tmp_path / ".c_3.json.unfinished").write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert [item.url for item in read_registrations(tmp_path)] == ["http://a:1"]
    assert [str(tmp_path / "torn.json") in record.getMessage() for record in caplog.records] == [True]


def test_only_ended_servers_of_this_machine_are_removed_whatever_their_files_are_called(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    here = socket.gethostname()
    left = registration("http://ended:1", host=here, process_id=ended.pid)
    register(tmp_path, left)
    (tmp_path / "copy.json").write_text(left.model_copy(update={"url": "http://copy:9"}).model_dump_json())
    register(tmp_path, registration("http://running:2", host=here, process_id=os.getpid()))
    register(tmp_path, registration("http://elsewhere:3", host=here + "-2", process_id=ended.pid))

    assert remove_ended(tmp_path) == ["http://copy:9", "http://ended:1"]
    assert [item.url for item in read_registrations(tmp_path)] == ["http://elsewhere:3", "http://running:2"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "garbage",
    [
        {"process_id": -1},
        {"process_id": 0},
        *({"url": url} for url in ("http://[bad", "http://127.0.0.1:99999", "http://a", "http://a:0", "a:1", "")),
        *({"url": url} for url in ("ftp://a:1", "http://[1.2]:3", "http://a:1/v1", "http://u@a:1", "http://a b:1")),
    ],
)
def test_what_is_no_address_or_process_is_no_registration(tmp_path: Path, garbage: dict[str, object]) -> None:
    right = registration("http://[::1]:5", host=socket.gethostname()).model_dump()
    (tmp_path / "right.json").write_text(json.dumps(right | {"host": "elsewhere"}))
    (tmp_path / "garbage.json").write_text(json.dumps(right | garbage))

    assert remove_ended(tmp_path) == []
    assert [item.url for item in read_registrations(tmp_path)] == ["http://[::1]:5"]
    assert (tmp_path / "garbage.json").exists()


async def test_the_run_waits_until_enough_registered_servers_answer(tmp_path: Path) -> None:
    said: list[str] = []
    async with ScriptedServer() as first, ScriptedServer() as second:
        register(tmp_path, registration(first.url))
        register(tmp_path, registration("http://127.0.0.1:1"))  # its launcher was killed
        waiting = asyncio.create_task(find(tmp_path, 2, say=said.append))
        while not said:
            assert not waiting.done()
            await asyncio.sleep(0.01)
        register(tmp_path, registration(second.url))

        assert sorted(await waiting) == sorted([first.url, second.url])
        assert sorted(await find(tmp_path, 1)) == sorted([first.url, second.url]), "also more than were asked for"
    assert str(tmp_path) in said[0] and "1 of 2" in said[0]
    assert "http://127.0.0.1:1 (process 12 on node7, since 2026-01-02T03:04:05+00:00): " in said[0]


async def test_servers_are_asked_with_the_key(tmp_path: Path) -> None:
    async with ScriptedServer() as server:
        asks_for_key(server, "/model_info")
        register(tmp_path, registration(server.url))

        assert await find(tmp_path, 1, key=KEY) == [server.url]
        with pytest.raises(RolloutError, match="it asks for another key"):
            await find(tmp_path, 1, key="wrong", timeout_seconds=0.0)


async def test_after_the_timeout_it_is_said_what_is_missing(tmp_path: Path) -> None:
    async with ScriptedServer() as server:
        register(tmp_path, registration(server.url))
        register(tmp_path, registration("http://127.0.0.1:1"))
        with pytest.raises(RolloutError) as error:
            await find(tmp_path, 3, timeout_seconds=0.0)

    first, *lines = str(error.value).split("\n")
    assert f"1 of rollout.num_servers = 3 servers that are registered in {tmp_path}" in first
    assert "tools/launch_rollout_servers.py" in first and "rollout.start_timeout_seconds" in first
    assert len(lines) == 1 and lines[0].startswith("  http://127.0.0.1:1 (process 12 on node7, since ")

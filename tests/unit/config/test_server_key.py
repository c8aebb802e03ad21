"""The key of the rollout servers: where it comes from, where it goes, and where it never shows."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from megatron_a3po.config.server_key import read_server_key
from megatron_a3po.errors import ConfigError, RolloutServerDied
from megatron_a3po.fleet.client import KeyRefused, RequestRefused, SGLangClient, is_loopback
from megatron_a3po.fleet.pool import ServerPool
from tests.support.scripted_server import Json, ScriptedServer

KEY = "5ec2e7-of-this-run"


def write_key(folder: Path, content: str = KEY + "\n", mode: int = 0o600) -> Path:
    file = folder / "key"
    file.write_text(content)
    file.chmod(mode)
    return file


def asks_for_key(server: ScriptedServer, *paths: str) -> list[str | None]:
    """Have it refuse these calls without the key; returns what it is sent, as it comes."""
    sent: list[str | None] = []

    async def check(request: web.Request, _: Json) -> web.StreamResponse:
        sent.append(request.headers.get("Authorization"))
        if sent[-1] != f"Bearer {KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"weight_version": "7"})

    for path in paths:
        server.script(path, check)
    return sent


@asynccontextmanager
async def client_of(url: str, key: str | None) -> AsyncIterator[SGLangClient]:
    async with aiohttp.ClientSession() as session:
        yield SGLangClient(url, session, 5.0, key)


def test_the_key_is_the_word_in_the_file_or_else_in_the_environment(tmp_path: Path) -> None:
    file = write_key(tmp_path)

    assert read_server_key(file, {}) == KEY
    assert read_server_key(None, {"A3PO_SERVER_KEY": "another"}) == "another"
    assert read_server_key(file, {"A3PO_SERVER_KEY": "another"}) == KEY
    assert read_server_key(None, {}) is None


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = write_key(tmp_path, mode=mode)

    with pytest.raises(ConfigError, match=rf"rollout\.key_file = '{file}': .*{mode:04o}.*chmod 600 {file}"):
        read_server_key(file)


@pytest.mark.parametrize("content", ["", "\n", "two words", "one\ntwo", "schlüssel", "a\x00b"])
def test_what_is_no_word_is_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.key_file = .*openssl rand") as from_file:
        read_server_key(write_key(tmp_path, content))
    with pytest.raises(ConfigError, match=r"A3PO_SERVER_KEY .*openssl rand") as from_environment:
        read_server_key(None, {"A3PO_SERVER_KEY": content})

    assert not content.strip() or content not in f"{from_file.value}{from_environment.value}"


def test_a_pipe_or_a_folder_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name in ("pipe", "folder"):
        # In a process of its own: a read of the pipe would have no end.
        program = "import sys, pathlib; from megatron_a3po.config.server_key import find_key_mistake as find; "
        command = [sys.executable, "-c", program + "print(find(pathlib.Path(sys.argv[1])))", str(tmp_path / name)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert f"rollout.key_file = '{tmp_path / name}'" in found.stdout and "openssl rand" in found.stdout


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.key_file = .*cannot be read"):
        read_server_key(tmp_path / "nothing")


@pytest.mark.parametrize("key", [KEY, None])
async def test_every_call_brings_the_key_if_there_is_one(key: str | None) -> None:
    paths = ["/model_info", "/server_info", "/ready", "/generate", "/pause_generation"]
    async with ScriptedServer() as server, client_of(server.url, key) as client:
        sent = asks_for_key(server, *paths)
        calls: list[Callable[[], Awaitable[object]]] = [
            client.weight_version,
            client.server_info,
            client.is_ready,
            lambda: client.generate({"input_ids": [1]}),
            lambda: client.post("/pause_generation", {}),
        ]
        for call in calls:
            await asyncio.gather(call(), return_exceptions=True)

    assert sent == [None if key is None else f"Bearer {key}"] * 5


@pytest.mark.parametrize("key", ["wrong-key", None])
async def test_a_server_that_asks_for_another_key_ends_the_wait_for_it_with_the_remedy(key: str | None) -> None:
    async with ScriptedServer() as server:
        asks_for_key(server, "/model_info")
        pool = ServerPool([server.url], timeout_seconds=5.0, key=key)
        with pytest.raises(KeyRefused, match=r"it asks for another key; .*rollout.key_file.*A3PO_SERVER_KEY") as error:
            await pool.wait_ready(60.0)
        await pool.close()

    assert "wrong-key" not in str(error.value)


async def test_a_wrong_key_is_no_mistake_of_the_request() -> None:
    """A server that came back with another key is left out, and its prompts go to the others."""
    async with ScriptedServer() as server, client_of(server.url, None) as client:
        asks_for_key(server, "/generate")
        with pytest.raises(KeyRefused) as error:
            await client.generate({"input_ids": [1]})

    assert not isinstance(error.value, RequestRefused)


async def test_an_answer_that_is_no_http_does_not_show_the_key() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 mail.example ESMTP\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with client_of(url, KEY) as client:
            with pytest.raises(RolloutServerDied, match="connection lost") as error:
                await client.server_info()

    assert KEY not in str(error.value)


async def test_the_key_does_not_follow_a_redirection() -> None:
    async with ScriptedServer() as server, ScriptedServer() as other, client_of(server.url, KEY) as client:
        sent = asks_for_key(other, "/model_info")

        async def redirect(request: web.Request, _: Json) -> web.StreamResponse:
            return web.Response(status=307, headers={"Location": f"{other.url}/model_info"})

        server.script("/model_info", redirect)
        assert "answered 307" in str(await client.problem())

    assert sent == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:30000", True),
        ("http://127.1.2.3:30000", True),
        ("http://localhost:30000", True),
        ("http://[::1]:30000", True),
        ("http://10.0.0.7:30000", False),
        ("http://localhost.example:30000", False),
        ("http://0.0.0.0:30000", False),
    ],
)
def test_which_addresses_no_other_machine_reaches(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected

"""A shared folder that cannot be used for a while ends no server and no publication: it is told, and tried again."""

import asyncio
import errno
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.serving import launcher
from megatron_a3po.serving.launcher import keep_running
from megatron_a3po.serving.registry import read_registrations, register, remove_ended
from tests.support.scripted_server import ScriptedServer
from tests.unit.serving.test_launcher import Launch
from tests.unit.serving.test_local_server import is_running, wait_until
from tests.unit.serving.test_registry import find, registration


def block(folder: Path) -> None:
    """Every use of it fails."""
    if folder.exists():
        folder.rename(folder.with_name("away"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("")


def free(folder: Path) -> None:
    folder.unlink()
    if (away := folder.with_name("away")).exists():
        away.rename(folder)


def look_until_told(launch: Launch, message: str) -> None:
    wait_until(lambda: launch.kept.look() or any(message in text for text in launch.said))
    for _ in range(3):
        launch.kept.look()
    assert sum(message in text for text in launch.said) == 1


def test_a_registration_that_cannot_be_made_or_taken_back_is_made_or_taken_back_later(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    block(launch.folder)
    with launch.kept:
        look_until_told(launch, "could not be registered")
        free(launch.folder)
        before = launch.look_until_registered()
        assert before.process_id == launch.servers[0].process_id and len(launch.servers) == 1

        block(launch.folder)
        launch.kill()
        with socket.create_server(("127.0.0.1", launch.servers[0].port)):
            look_until_told(launch, f"the registration of {before.url} could not be taken back")
            assert is_running(launch.servers[1].process_id)
            free(launch.folder)
            assert launch.registered == [before]
            launch.kept.look()
            assert before not in launch.registered
            assert launch.look_until_registered().url == launch.servers[1].url != before.url


def test_a_registration_that_could_not_be_taken_back_is_replaced_by_that_of_the_next_server(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    with launch.kept:
        before = launch.look_until_registered()
        block(launch.folder)
        launch.kill()
        look_until_told(launch, f"the registration of {before.url} could not be taken back")
        free(launch.folder)
        launch.kept._register(launch.servers[1])  # before the next look
        launch.kept.look()
        (after,) = launch.registered
        assert (after.url, after.process_id) == (before.url, launch.servers[1].process_id)


def test_servers_end_also_where_their_registrations_cannot_be_taken_back(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    with launch.kept:
        launch.look_until_registered()
        block(launch.folder)
    assert not is_running(launch.servers[0].process_id)
    assert "could not be taken back" in launch.said[-1]


def lose_log(launch: Launch) -> None:
    """The next start fails."""
    launch.log.rename(launch.log.with_name("before.log"))
    launch.log.mkdir()


def test_a_server_that_cannot_be_started_at_first_ends_the_launcher_with_the_reason(tmp_path: Path) -> None:
    bad, good = Launch(tmp_path / "bad"), Launch(tmp_path / "good")
    bad.log.mkdir()
    with pytest.raises(RolloutError, match=rf"Is a directory: '{bad.log}'"):
        keep_running([good.kept, bad.kept], threading.Event())
    assert not is_running(good.servers[0].process_id)


def test_a_server_that_cannot_be_restarted_for_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Launch(tmp_path)
    with bad.kept:
        lose_log(bad)
        bad.kill()
        bad.kept.look()
        bad.kept.look()
        assert not bad.kept.is_given_up
        monkeypatch.setattr(launcher, "RESTART_WINDOW_SECONDS", 0.0)
        bad.kept.look()
        assert bad.kept.is_given_up
        bad.log.rmdir()
        bad.kept.look()
    assert len(bad.servers) == 4
    assert "could not be started for 0 s; it is given up" in bad.said[-1]


def test_a_server_whose_log_cannot_be_opened_is_started_again_later_and_others_go_on(tmp_path: Path) -> None:
    bad, good = Launch(tmp_path / "bad"), Launch(tmp_path / "good")
    stop = threading.Event()

    def repair() -> None:
        wait_until(lambda: bool(good.registered and bad.registered))
        lose_log(bad)
        bad.kill()
        wait_until(lambda: any("could not be started" in text for text in bad.said))
        assert bad.registered == []
        bad.log.rmdir()
        wait_until(lambda: bool(bad.registered))
        stop.set()

    thread = threading.Thread(target=repair, daemon=True)
    thread.start()
    threading.Timer(60.0, stop.set).start()
    assert keep_running([bad.kept, good.kept], stop) is True
    thread.join(10.0)
    assert len(good.servers) == 1
    (told,) = (text for text in bad.said if "could not be started" in text)
    assert f"Is a directory: '{bad.log}'" in told
    assert "is ready" in bad.said[-1]


def test_registrations_that_cannot_be_read_or_removed_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "servers"
    block(folder)
    with pytest.raises(NotADirectoryError):
        read_registrations(folder)
    with caplog.at_level(logging.WARNING):
        assert remove_ended(folder) == []
    assert f"the registrations in {folder} cannot be read" in caplog.text

    free(folder)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    for port in (1, 2):
        register(folder, registration(f"http://a:{port}", host=socket.gethostname(), process_id=ended.pid))

    def unlink(path: Path, missing_ok: bool) -> None:
        if path.name == "a_1.json":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        os.unlink(path)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "unlink", unlink)
        assert remove_ended(folder) == ["http://a:1", "http://a:2"]
    assert f"{folder / 'a_1.json'} cannot be removed: [Errno 116] Stale file handle" in caplog.text
    assert [item.url for item in read_registrations(folder)] == ["http://a:1"]


async def test_a_run_waits_also_for_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    folder, said = tmp_path / "servers", list[str]()
    block(folder)
    with pytest.raises(RolloutError, match=r"cannot be read: .*Not a directory"):
        await find(folder, 1, timeout_seconds=0.1, say=said.append)
    async with ScriptedServer() as server:
        finding = asyncio.create_task(find(folder, 1, timeout_seconds=60.0, say=said.append))
        while len(said) < 2:
            await asyncio.sleep(0.01)
        free(folder)
        register(folder, registration(server.url))
        assert await finding == [server.url]
    assert "cannot be read" in said[1]


async def test_a_publication_goes_on_without_news_and_tells_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "servers"
    async with ScriptedServer(version="0") as server, ScriptedServer(version="0") as newcomer:
        pool = ServerPool([server.url], timeout_seconds=5.0)

        def find_urls() -> list[str]:
            return [item.url for item in read_registrations(folder)]

        fleet = Fleet(pool, None, timeout_seconds=5.0, find_urls=find_urls)  # type: ignore[arg-type]
        await fleet._settle_members("due")
        block(folder)
        for _ in range(2):
            await fleet._settle_members("due")
        assert [member.url for member in pool.membership.members] == [server.url]
        free(folder)
        register(folder, registration(newcomer.url))
        await fleet._settle_members("due")
        block(folder)
        await fleet._settle_members("due")
        assert [member.url for member in pool.membership.members] == [server.url, newcomer.url]
        await pool.close()
    warnings = [record.getMessage() for record in caplog.records if "cannot be looked up" in record.getMessage()]
    assert len(warnings) == 2 and str(folder) in warnings[0]

"""The folder of a run: one run at a time, resumed only with the settings that it was started with."""

import errno
import gc
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megatron_a3po.errors import ConfigError
from megatron_a3po.preflight.load import known_keys
from megatron_a3po.runtime.run_dir import (
    MAY_CHANGE,
    claim_run_dir,
    differing_keys,
    holds_run,
    lock_run_dir,
    refuse_used_run_dir,
    truncate_metrics,
)
from tests.support.paths import ROOT

CONFIG = {
    "model": "models/tiny",
    "run_dir": "runs/a",
    "num_steps": 60,
    "seed": 0,
    "data": {"task": "spell", "task_options": {"min_word_len": 6}},
    "rollout": {"servers": "local", "group_size": 8, "request_timeout_seconds": 60.0},
    "optimizer": {"learning_rate": 2e-5},
    "algorithm": {"weight_cap": 5.0},
}
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from megatron_a3po.runtime.run_dir import claim_run_dir
claim_run_dir(Path(sys.argv[1]), "seed: 0\\n", resume=True)
assert "torch" not in sys.modules
print("locked", flush=True)
sys.stdin.readline()
program = subprocess.Popen(["sh", "-c", "echo $$; exec sleep 60"], close_fds=False)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_on_the_folder_is_refused_while_the_first_lives_and_not_after_it_was_killed(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    for resume in (True, False):
        with pytest.raises(ConfigError, match="still alive") as refused:
            claim_run_dir(tmp_path, "seed: 0\n", resume=resume)
        assert f"process {holder.pid})" in str(refused.value) and os.uname().nodename in str(refused.value)
        assert str(tmp_path) in str(refused.value)

    holder.send_signal(signal.SIGKILL)
    holder.wait()
    claim_run_dir(tmp_path, "seed: 0\n", resume=True).release()
    assert f"process {os.getpid()}" in (tmp_path / "lock").read_text()


def test_a_second_run_in_the_same_process_is_refused_until_the_lock_is_released(tmp_path: Path) -> None:
    lock = claim_run_dir(tmp_path, "seed: 0\n")
    with pytest.raises(ConfigError, match="still alive"):
        lock_run_dir(tmp_path)
    lock.release()
    lock.release()

    lock_run_dir(tmp_path).release()


def test_the_lock_needs_no_variable_that_holds_it(tmp_path: Path) -> None:
    claim_run_dir(tmp_path, "seed: 0\n")
    gc.collect()

    with pytest.raises(ConfigError, match="still alive"):
        lock_run_dir(tmp_path)


def test_a_program_that_the_run_started_does_not_keep_the_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.write("start\n")
    holder.stdin.flush()
    started = int(holder.stdout.readline())
    holder.kill()
    holder.wait()

    lock_run_dir(tmp_path).release()
    os.kill(started, signal.SIGKILL)  # it was alive


def test_a_damaged_lock_file_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"\xff\x00" * 500)
    lock = lock_run_dir(tmp_path)
    assert (tmp_path / "lock").read_text() == f"host {os.uname().nodename}, process {os.getpid()}\n"
    (tmp_path / "lock").write_bytes(b"")

    with pytest.raises(ConfigError, match="its process is not known"):
        lock_run_dir(tmp_path)
    lock.release()


def test_a_filesystem_without_locks_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: int) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(logging.getLogger("megatron_a3po"), "propagate", True)
    monkeypatch.setattr("fcntl.flock", no_locks)
    lock_run_dir(tmp_path).release()
    assert "no lock on this filesystem" in caplog.text


def test_a_fresh_run_takes_an_empty_folder_and_none_that_holds_a_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a"
    assert not holds_run(run_dir)
    claim_run_dir(run_dir, "seed: 0\n").release()
    assert (run_dir / "config.resolved.yaml").read_text() == "seed: 0\n" and (run_dir / "logs").is_dir()

    with pytest.raises(ConfigError, match="there is a run in this folder"):
        claim_run_dir(run_dir, "seed: 1\n")
    with pytest.raises(ConfigError, match="there is a run in this folder"):
        refuse_used_run_dir(run_dir)
    assert (run_dir / "config.resolved.yaml").read_text() == "seed: 0\n"
    lock_run_dir(run_dir).release()


def test_a_full_disk_leaves_no_half_configuration_that_would_block_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("megatron_a3po.runtime.files.os.fsync", full)
        with pytest.raises(ConfigError, match="No space left"):
            claim_run_dir(tmp_path, "seed: 0\n")
    assert not holds_run(tmp_path) and not list(tmp_path.glob("*unfinished*")) + list(tmp_path.glob(".*unfinished"))
    claim_run_dir(tmp_path, "seed: 0\n").release()
    assert (tmp_path / "config.resolved.yaml").read_text() == "seed: 0\n"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot be created"):
        claim_run_dir(tmp_path / "file" / "run", "seed: 0\n")


def test_a_run_may_be_resumed_with_settings_that_do_not_change_what_it_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron_a3po"), "propagate", True)
    caplog.set_level(logging.INFO)
    claim_run_dir(tmp_path, yaml.safe_dump(CONFIG), resume=True).release()
    servers = ["http://a:1", "http://b:1"]
    changed = CONFIG | {"num_steps": 90, "rollout": {"group_size": 8, "servers": servers}, "parallel": {"tensor": 2}}
    changed = dict(reversed(changed.items()))
    claim_run_dir(tmp_path, yaml.safe_dump(changed, sort_keys=False), resume=True).release()

    assert yaml.safe_load((tmp_path / "config.resolved.yaml").read_text()) == changed
    assert "num_steps: 60 before, 90 now" in caplog.text and "rollout.servers: 'local' before" in caplog.text
    assert "request_timeout_seconds: 60.0 before, not set now" in caplog.text


def test_every_setting_that_must_not_change_is_named_and_nothing_is_stored(tmp_path: Path) -> None:
    stored = yaml.safe_dump(CONFIG)
    claim_run_dir(tmp_path, stored).release()
    changed = CONFIG | {
        "num_steps": 90,
        "seed": 1,
        "data": {"task": "spell", "task_options": {}},
        "rollout": CONFIG["rollout"] | {"group_size": 4},  # type: ignore[operator]
        "optimizer": {"learning_rate": 1e-5},
        "algorithm": {"weight_cap": None},
        "max_staleness": 3,
    }
    with pytest.raises(ConfigError) as refused:
        claim_run_dir(tmp_path, yaml.safe_dump(changed), resume=True)

    assert str(refused.value).splitlines()[1:-1] == [
        "  algorithm.weight_cap: 5.0 before, None now",
        "  data.task_options.min_word_len: 6 before, not set now",
        "  optimizer.learning_rate: 2e-05 before, 1e-05 now",
        "  rollout.group_size: 8 before, 4 now",
        "  seed: 0 before, 1 now",
        "  max_staleness: not set before, 3 now",
    ]
    assert (tmp_path / "config.resolved.yaml").read_text() == stored
    claim_run_dir(tmp_path, stored, resume=True).release()


def test_text_and_order_do_not_matter_and_values_do() -> None:
    left, right = (
        yaml.safe_load("a: {b: 1, c: [2, x]}\nd: 1.0e-05"),
        yaml.safe_load("d: 0.00001\na:\n  c: [2, 'x']\n  b: 1"),
    )

    assert differing_keys(left, right) == {}
    assert differing_keys(left, {"a": 1, "d": None}) == {
        "a.b": "1 before, not set now",
        "a.c": "[2, 'x'] before, not set now",
        "d": "1e-05 before, None now",
        "a": "not set before, 1 now",
    }


def test_the_keys_that_may_change_exist() -> None:
    coming = {"resume", "checkpoint.*"}
    keys = [*known_keys(), *coming]

    assert [name for name in MAY_CHANGE if not any(Path(key).match(name) for key in keys)] == []


@pytest.mark.parametrize("content", [b"", b"- 1\n", b"a: [", b"\xff"])
def test_a_damaged_stored_configuration_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.resolved.yaml").write_bytes(content)

    with pytest.raises(ConfigError, match="start a new run"):
        claim_run_dir(tmp_path, yaml.safe_dump(CONFIG), resume=True)


def row(step: int) -> str:
    return json.dumps({"step": step, "reward_mean": 0.1 + step, "note": "\u2028"})


@pytest.mark.parametrize("tail", ["", "\n", "\n" + row(6)[:12], "\n" + "\x00" * 9, "\n" + '{"st'])
def test_metrics_after_the_resumed_step_go_and_the_others_stay_as_they_are(tmp_path: Path, tail: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(row(step) for step in range(6)) + tail)

    assert truncate_metrics(tmp_path, 3) in (2, 3)
    assert file.read_text() == "".join(row(step) + "\n" for step in range(4))
    assert truncate_metrics(tmp_path, 3) == 0
    assert truncate_metrics(tmp_path, -1) == 4 and file.read_text() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_whole_last_row_without_its_line_end_stays(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{row(0)}\n{row(1)}")

    assert truncate_metrics(tmp_path, 9) == 0
    assert (tmp_path / "metrics.jsonl").read_text() == f"{row(0)}\n{row(1)}\n"


def test_a_run_without_metrics_has_nothing_to_truncate(tmp_path: Path) -> None:
    assert truncate_metrics(tmp_path, 3) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_broken_row_before_the_last_is_named(tmp_path: Path) -> None:
    text = f"{row(0)}\n{row(1)[:5]}\n{row(2)}\n"
    (tmp_path / "metrics.jsonl").write_text(text)

    with pytest.raises(ConfigError, match="line 2 is broken"):
        truncate_metrics(tmp_path, 0)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_metrics_that_cannot_be_rewritten_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f"{row(0)}\n{row(1)}\n")

    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        truncate_metrics(tmp_path, 0)
    assert file.read_text() == f"{row(0)}\n{row(1)}\n"

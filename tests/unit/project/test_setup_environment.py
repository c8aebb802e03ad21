"""The set-up script under faults, with a scripted uv: nothing is downloaded or installed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import ROOT

BASE_PYTHON = getattr(sys, "_base_executable", sys.executable)
PROGRAMS = (
    "awk bash cat cut date dirname df env find flock getconf grep head ln ls mkdir mktemp mv realpath rm sed sha256sum "
    "sleep sort tail uname"
)

FAKE_UV = """#!/usr/bin/env bash
echo "$@" >>"$CALLS"
echo "index ${UV_DEFAULT_INDEX:-none}" >>"$CALLS"
case "$1 $2" in
  "venv "*)
    [ -z "${UV_CANNOT_FETCH:-}" ] || { echo "error: error sending request for url"; exit 2; }
    mkdir -p "${@: -1}/bin" && ln -sf "$BASE_PYTHON" "${@: -1}/bin/python" ;;
  "pip sync")
    echo half >"$VENV/half_installed"
    sleep "${SYNC_SECONDS:-0}"
    [ -z "${SYNC_FAILS:-}" ] || { printf '%s\\n' "$SYNC_FAILS"; exit 1; }
    mv "$VENV/half_installed" "$VENV/installed" ;;
esac
"""


class Sandbox:
    """A copy of the script with its inputs, and a PATH that has only what the test put there."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        self.bin = folder / "bin"
        self.venv = folder / "venv"
        self.calls = folder / "calls"
        for made in (self.checkout / "tools", self.checkout / "requirements", self.bin):
            made.mkdir(parents=True)
        self.script = Path(shutil.copy(ROOT / "tools" / "setup_environment.sh", self.checkout / "tools"))
        (self.checkout / "setup.py").write_text("")
        (self.checkout / "requirements" / "cpu.lock").write_text("one==1\n")
        for name in PROGRAMS.split():
            (self.bin / name).symlink_to(str(shutil.which(name)))
        self.program("cc", "exit 0")
        self.program("uv", FAKE_UV)
        self.program("python3.12", f'exec "{BASE_PYTHON}" "$@"')
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "VENV": str(self.venv),
            "CALLS": str(self.calls),
            "BASE_PYTHON": BASE_PYTHON,
            "MIN_FREE_GB": "0",
            "PIP_CONFIG_FILE": os.devnull,
        }

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(text if text.startswith("#!") else f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def start(self, kind: str = "cpu", **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.bin / "bash"), str(self.script), kind],
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # Else ignored where the tests themselves are in the background of a script.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, kind: str = "cpu", **variables: str) -> tuple[int, str]:
        process = self.start(kind, **variables)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def num_calls(self, start: str) -> int:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return sum(line.startswith(start) for line in lines)


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited 10 s in vain"
        time.sleep(0.02)


def assert_refused(result: tuple[int, str], *expected: str) -> None:
    status, output = result
    assert status == 1, output
    assert re.findall("^(?:error|remedy): ", output, re.MULTILINE) == ["error: ", "remedy: "], output
    for text in expected:
        assert text in output


def test_an_environment_is_made_once_and_then_found_up_to_date_without_calling_uv(sandbox: Sandbox) -> None:
    status, output = sandbox.run()
    assert status == 0, output
    assert (sandbox.venv / "installed").exists()
    assert sandbox.num_calls("pip sync") == 1
    assert sandbox.num_calls("pip install") == 1
    sandbox.calls.unlink()
    assert sandbox.run() == (0, "")
    assert sandbox.run("auto") == (0, "")
    assert not sandbox.calls.exists()


def test_a_changed_lock_updates_the_existing_environment_which_stays_if_there_is_no_network(sandbox: Sandbox) -> None:
    sandbox.run()
    (sandbox.venv / "kept").touch()
    (sandbox.checkout / "requirements" / "cpu.lock").write_text("one==2\n")
    assert_refused(sandbox.run(SYNC_FAILS="error: Failed to fetch\n  cause: dns error"), "cannot be reached")
    status, output = sandbox.run()
    assert status == 0, output
    assert (sandbox.num_calls("pip sync"), sandbox.num_calls("venv")) == (3, 1)
    assert (sandbox.venv / "kept").exists()


def test_a_set_up_killed_halfway_is_made_anew_by_the_next_one(sandbox: Sandbox) -> None:
    process = sandbox.start(SYNC_SECONDS="30")
    wait_until((sandbox.venv / "half_installed").exists)
    (sandbox.venv / "torn_package").touch()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    status, output = sandbox.run()
    assert status == 0, output
    assert (sandbox.venv / "installed").exists()
    assert not (sandbox.venv / "torn_package").exists()


def test_of_two_set_ups_at_once_one_waits_and_finds_the_work_done(sandbox: Sandbox) -> None:
    first = sandbox.start(SYNC_SECONDS="0.7")
    wait_until((sandbox.venv / "half_installed").exists)
    status, output = sandbox.run()
    assert status == 0, output
    assert "waiting for it" in output
    assert first.wait(timeout=60) == 0
    assert sandbox.num_calls("pip sync") == 1


def test_an_interrupt_ends_the_script_and_its_uv(sandbox: Sandbox) -> None:
    process = sandbox.start(SYNC_SECONDS="60")
    wait_until((sandbox.venv / "half_installed").exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    os.killpg(process.pid, signal.SIGKILL)


def test_a_folder_that_the_script_did_not_make_is_left_alone(sandbox: Sandbox) -> None:
    sandbox.venv.mkdir()
    (sandbox.venv / "thesis.txt").write_text("precious")
    assert_refused(sandbox.run(), str(sandbox.venv), "was not made by this script", "point VENV elsewhere")
    assert (sandbox.venv / "thesis.txt").read_text() == "precious"


def test_without_python_312_anywhere_the_remedy_names_ways_to_get_it(sandbox: Sandbox) -> None:
    (sandbox.bin / "python3.12").unlink()
    result = sandbox.run(UV_CANNOT_FETCH="1")
    assert_refused(result, "no Python 3.12", "could not fetch one", "apt-get install", "PYTHON=", f"{sandbox.venv}.log")


def test_a_pyenv_shim_that_exits_127_is_passed_over(sandbox: Sandbox) -> None:
    sandbox.program("python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    sandbox.program("python3", f'exec "{BASE_PYTHON}" "$@"')
    status, output = sandbox.run()
    assert status == 0, output
    assert sandbox.num_calls(f"venv --allow-existing --no-python-downloads --python {BASE_PYTHON}") == 1


def test_a_python_named_by_the_user_must_work(sandbox: Sandbox) -> None:
    assert_refused(sandbox.run(PYTHON="/nowhere/python"), "PYTHON=/nowhere/python")


@pytest.mark.parametrize("short", ["VENV", "UV_CACHE_DIR"])
def test_a_full_disk_is_reported_before_anything_is_downloaded(sandbox: Sandbox, tmp_path: Path, short: str) -> None:
    folders = {name: tmp_path / "disks" / name for name in ("VENV", "UV_CACHE_DIR")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    sandbox.program(
        "df",
        "echo header\n"
        f'case "$2" in *{short}*) free=3900000 ;; *) free=99000000 ;; esac\n'
        'echo "/dev/disk 250000000 1 $free 99% /"',
    )
    places = {name: str(folder / "new") for name, folder in folders.items()}
    result = sandbox.run(MIN_FREE_GB="", **places)
    assert_refused(result, f"3 GB free on the disk of {places[short]}", "needs 9 GB", f"point {short} at")
    assert not sandbox.calls.exists()


def test_a_missing_network_ends_in_one_line_and_the_path_of_the_log(sandbox: Sandbox) -> None:
    output_of_uv = "error: Failed to fetch: `https://index.invalid/simple/`\n  cause: dns error: no such host"
    log = Path(f"{sandbox.venv}.log")
    assert_refused(
        sandbox.run(SYNC_FAILS=output_of_uv), "cannot be reached", str(log), "UV_DEFAULT_INDEX", "HTTPS_PROXY"
    )
    assert output_of_uv in log.read_text()
    status, output = sandbox.run()
    assert status == 0, output


def test_any_other_failure_of_uv_is_told_in_its_own_words(sandbox: Sandbox) -> None:
    output_of_uv = (
        "Resolved 2\nerror: Failed to build `one==1`\n  cause: The backend failed\n\n    gcc: cannot connect a to b"
    )
    assert_refused(sandbox.run(SYNC_FAILS=output_of_uv), "uv failed: Failed to build `one==1`: The backend failed (")


def test_a_disk_that_fills_up_meanwhile_is_named(sandbox: Sandbox) -> None:
    assert_refused(
        sandbox.run(SYNC_FAILS="error: No space left on device (os error 28)"), "disk is full", "UV_CACHE_DIR"
    )


def test_without_uv_and_without_a_way_to_install_it_the_remedy_says_so(sandbox: Sandbox) -> None:
    (sandbox.bin / "uv").unlink()
    sandbox.program("python3.12", f'case "$*" in *"-m pip"*) exit 1 ;; esac; exec "{BASE_PYTHON}" "$@"')
    result = sandbox.run(PIP_NO_INDEX="1")
    assert_refused(result, "uv could not be installed", "check the network, or install uv")
    assert not list(sandbox.checkout.glob(".uv.*"))


@pytest.mark.parametrize(
    ("program", "text", "expected"),
    [
        ("cc", None, "apt-get install gcc"),
        ("getconf", "echo glibc 2.31", "glibc 2.34"),
        ("getconf", "exit 1", "glibc 2.34"),
        ("uname", "echo Darwin arm64", "Darwin arm64"),
        ("uname", "echo Linux aarch64", "Linux aarch64"),
    ],
)
def test_another_machine_is_refused(sandbox: Sandbox, program: str, text: str | None, expected: str) -> None:
    (sandbox.bin / program).unlink()
    if text is not None:
        sandbox.program(program, text)
    assert_refused(sandbox.run(), expected)


def test_an_unknown_kind_of_environment_is_refused(sandbox: Sandbox) -> None:
    assert_refused(sandbox.run("tpu"), "'tpu'", "cpu, gpu or auto")


@pytest.mark.parametrize("uv_index", [None, "https://uv.invalid/simple"])
def test_the_index_of_pip_is_handed_to_uv_unless_uv_has_one(
    sandbox: Sandbox, tmp_path: Path, uv_index: str | None
) -> None:
    pip_configuration = tmp_path / "pip.conf"
    pip_configuration.write_text("[global]\nindex-url = https://mirror.invalid/simple\n")
    given = {} if uv_index is None else {"UV_DEFAULT_INDEX": uv_index}
    sandbox.run(PIP_CONFIG_FILE=str(pip_configuration), **given)
    assert sandbox.num_calls(f"index {uv_index or 'https://mirror.invalid/simple'}") == 3

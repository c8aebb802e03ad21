"""What signals do to a rank, tried on processes that do nothing but wait."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_a3po.runtime.signals import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE
from megatron_a3po.runtime.waiting import wait_until
from tests.support.own_process import BARE_PACKAGE
from tests.support.paths import ROOT

PRELUDE = """
import ctypes, os, signal, sys, time
from megatron_a3po.runtime import signals

def wait_for_request(preemption):
    while not preemption.requested_by:
        time.sleep(0.01)

def block_in_c():
    "A wait in which Python cannot run its signal handlers, like one in a collective."
    lock = ctypes.c_char_p(bytes(64))
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(lock)
    say("blocked")
    library.pthread_mutex_lock(lock)

def say(word):
    print(word, flush=True)

def watch(grace_seconds=60.0, raise_interrupted=True, is_training=True):
    preemption = signals.Preemption()
    preemption.watch(grace_seconds=grace_seconds)
    if raise_interrupted:
        preemption.raise_interrupted()
    if is_training:
        preemption.look()
    say("watching")
    return preemption

try:
{body}
except signals.Preempted as error:
    say(error)
    sys.exit(signals.PREEMPTED_EXIT_CODE)
except signals.Interrupted as error:
    say(f"cleaned up after {{error}}")
    sys.exit(signals.INTERRUPTED_EXIT_CODE)
"""
WAIT = "watch(); time.sleep(60)"
STEP_AND_SAVE = "preemption = watch(); wait_for_request(preemption); preemption.end_run(7, preemption.requested_by)"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process with this program, which has reached its `watch` when the function returns."""
    processes = []

    def start(body: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program_of(body)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
        processes.append(process)
        assert line(process) == "watching"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def program_of(body: str) -> str:
    return BARE_PACKAGE + PRELUDE.format(body=textwrap.indent(body, "    "))


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_rank_that_is_asked_to_stop_ends_in_its_own_time_with_the_code_for_trying_again(
    start: Start, number: signal.Signals
) -> None:
    process = start(STEP_AND_SAVE)
    process.send_signal(number)

    assert line(process) == (
        f"ended by {number.name} after step 7, which is saved; the same command goes on from there (exit code 75)"
    )
    assert process.wait(60) == PREEMPTED_EXIT_CODE == os.EX_TEMPFAIL


def test_a_run_without_a_step_says_so(start: Start) -> None:
    process = start(STEP_AND_SAVE.replace("7", "0"))
    process.terminate()

    assert line(process).startswith("ended by SIGTERM before the first step; ")


@pytest.mark.parametrize(
    ("number", "body"),
    [
        (signal.SIGINT, WAIT),
        (signal.SIGTERM, "watch(grace_seconds=None); time.sleep(60)"),
        (signal.SIGTERM, "watch(grace_seconds=0.2); time.sleep(60)"),
        (signal.SIGTERM, "watch(is_training=False); time.sleep(60)"),
    ],
    ids=["Ctrl-C", "nothing to save", "grace is over", "not training yet"],
)
def test_a_rank_ends_at_once_and_cleans_up(start: Start, number: signal.Signals, body: str) -> None:
    process = start(body)
    process.send_signal(number)

    assert line(process) == f"cleaned up after {number.name}"
    assert process.wait(60) == INTERRUPTED_EXIT_CODE


@pytest.mark.parametrize(
    ("repeated_seconds", "afterwards", "expected"),
    [
        ("0.0", "time.sleep(60)", "cleaned up after SIGTERM"),
        ("1e9", "time.sleep(0.3); say('goes on')", "goes on"),
    ],
    ids=["later", "the first one by another way"],
)
def test_a_second_sigterm_ends_at_once_unless_it_comes_with_the_first(
    start: Start, repeated_seconds: str, afterwards: str, expected: str
) -> None:
    body = f"signals._REPEATED_SECONDS = {repeated_seconds}\npreemption = watch()\nwait_for_request(preemption)\n"
    process = start(f"{body}say('asked')\n{afterwards}")
    process.terminate()
    assert line(process) == "asked"
    process.terminate()

    assert line(process) == expected


def test_a_rank_with_nothing_to_clean_up_ends_even_while_it_waits_for_a_rank_that_is_gone(start: Start) -> None:
    process = start("watch(raise_interrupted=False); block_in_c()")
    assert line(process) == "blocked"
    process.send_signal(signal.SIGINT)

    assert process.wait(60) == INTERRUPTED_EXIT_CODE


def test_a_rank_that_cannot_clean_up_because_it_waits_for_a_rank_that_is_gone_ends_all_the_same(start: Start) -> None:
    process = start("signals._TAKE_SECONDS = 0.2; watch(); block_in_c()")
    assert line(process) == "blocked"
    process.send_signal(signal.SIGINT)

    assert process.wait(60) == INTERRUPTED_EXIT_CODE


# As a library does that tries an import; what it has then is broken, or it goes on as if nobody had asked.
SWALLOW = """
try:
    say("importing")
    time.sleep(60)
except BaseException:
    say("swallowed")
"""


def test_an_interrupt_that_a_library_swallows_ends_the_rank_all_the_same(start: Start) -> None:
    process = start(f"watch(){SWALLOW}signals._CLEAN_UP_SECONDS = 0.2; time.sleep(60)")
    assert line(process) == "importing"
    process.send_signal(signal.SIGINT)

    assert line(process) == "swallowed"
    assert process.wait(60) == INTERRUPTED_EXIT_CODE


def test_a_second_ctrl_c_ends_a_rank_whose_first_one_was_swallowed(start: Start) -> None:
    process = start(f"watch(){SWALLOW}time.sleep(0.5); signals._REPEATED_SECONDS = 0.0; say('goes on'); time.sleep(60)")
    assert line(process) == "importing"
    process.send_signal(signal.SIGINT)
    assert (line(process), line(process)) == ("swallowed", "goes on")
    process.send_signal(signal.SIGINT)

    assert process.wait(60) == INTERRUPTED_EXIT_CODE


def test_cleaning_up_is_not_disturbed_by_a_signal_that_comes_twice_nor_by_its_length(start: Start) -> None:
    body = """
signals._REPEATED_SECONDS = 1e9
signals._TAKE_SECONDS = 1.0
watch()
try:
    say("working")
    time.sleep(60)
finally:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
"""
    process = start(body)
    assert line(process) == "working"
    process.send_signal(signal.SIGINT)

    assert line(process) == "cleaned up after SIGINT"


def test_nothing_disturbs_the_handler_of_an_interrupt(start: Start) -> None:
    body = """
preemption = watch()
try:
    say("working")
    time.sleep(60)
except signals.Interrupted:
    preemption.be_over()
    signals._CLEAN_UP_SECONDS = signals._REPEATED_SECONDS = 0.0
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
    say("told the user")
"""
    process = start(body)
    assert line(process) == "working"
    process.send_signal(signal.SIGINT)

    assert line(process) == "told the user"


def test_before_it_has_something_to_clean_up_a_rank_just_ends(start: Start) -> None:
    process = start(f"watch(raise_interrupted=False){SWALLOW}time.sleep(60)")
    assert line(process) == "importing"
    process.send_signal(signal.SIGINT)

    assert process.wait(60) == INTERRUPTED_EXIT_CODE
    assert line(process) == ""


# `_run` of the command, whose import of the training loop swallows what comes.
COMMAND = """
import os, sys, time
from pathlib import Path
from megatron_a3po import __main__ as command
from megatron_a3po.config import DataConfig, RunConfig

screen = os.dup(1)

class Importing:
    def find_spec(self, name, path, target=None):
        if name == "megatron_a3po.train":
            try:
                os.write(screen, b"importing\\n")
                time.sleep(60)
            finally:
                time.sleep(60)

sys.meta_path.insert(0, Importing())
folder = Path(sys.argv[1])
config = RunConfig(model=folder, run_dir=folder, num_steps=1, data=DataConfig(task="spell_backward"))
command._run(config, 0, folder / "rank0.log")
"""


def test_a_command_that_still_imports_ends_at_once_by_ctrl_c(tmp_path: Path) -> None:
    program = [sys.executable, "-c", COMMAND, str(tmp_path)]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert line(process) == "importing"
            process.send_signal(signal.SIGINT)

            assert process.wait(60) == INTERRUPTED_EXIT_CODE
            assert line(process) == "ended by SIGINT, with nothing to clean up"
        finally:
            process.kill()


def test_a_signal_that_somebody_else_handles_asks_for_nothing(start: Start) -> None:
    body = """
signal.signal(signal.SIGCHLD, lambda *_: say("a child has ended"))
preemption = watch()
os.kill(os.getpid(), signal.SIGCHLD)
time.sleep(0.5)
say(preemption.requested_by)
"""
    process = start(body)
    assert (line(process), line(process)) == ("a child has ended", "0")


def test_nothing_disturbs_the_end_of_a_run_that_has_saved(start: Start) -> None:
    body = """
preemption = watch()
wait_for_request(preemption)
try:
    preemption.end_run(3, preemption.requested_by)
finally:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
"""
    process = start(body)
    process.terminate()

    assert "after step 3" in line(process) and process.wait(60) == PREEMPTED_EXIT_CODE


RANKS = """
import os, signal, subprocess, sys
command = [sys.executable, "-c", sys.argv[1]]
ranks = []
for rank in range(2):
    environment = os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
assert [rank.stdout.readline() for rank in ranks] == ["watching\\n"] * 2
if sys.argv[2] == "a sibling":
    ranks[1].kill()
    ranks[1].wait()
if sys.argv[2] == "the parent":
    print(ranks[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
ranks[0].terminate()
print(ranks[0].stdout.readline(), end="", flush=True)
for rank in ranks:
    rank.kill()
"""


@pytest.mark.parametrize(("whom", "expected"), [("a sibling", "cleaned up after SIGTERM\n"), ("nobody", "asked\n")])
def test_a_sigterm_after_the_end_of_another_rank_is_torchruns_and_ends_at_once(whom: str, expected: str) -> None:
    body = "preemption = watch()\nwait_for_request(preemption)\nsay('asked')"
    command = [sys.executable, "-c", RANKS, program_of(body), whom]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout == expected


def test_a_sigterm_from_the_kernel_for_a_parent_that_is_gone_ends_at_once(tmp_path: Path) -> None:
    body = f"""
from megatron_a3po.runtime.processes import die_with_parent
die_with_parent()
preemption = watch()
try:
    time.sleep(60)
finally:
    open({str(tmp_path / "ended")!r}, "w").write(str(preemption.requested_by))
"""
    command = [sys.executable, "-c", RANKS, program_of(body), "the parent"]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    ended = tmp_path / "ended"
    wait_until(lambda: (ended.exists() and ended.read_text()) or None, 60.0, look_seconds=0.02)
    assert ended.read_text() == "0", "it was taken for a wish to stop after the step"

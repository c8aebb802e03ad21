"""The screen belongs to the run's own messages; whatever libraries write goes to the log file."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from megatron_a3po.runtime.logging import progress_line
from tests.support.own_process import BARE_PACKAGE
from tests.support.paths import ROOT


def run(program: str, log_file: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that finds `screen`, what redirect_output gave it."""
    start = f"""
        import logging, os, sys
        from pathlib import Path
        from megatron_a3po.runtime.logging import configure_logging, logger, redirect_output

        print("before")
        screen = redirect_output(Path({str(log_file)!r}))
    """
    return subprocess.run(
        [sys.executable, "-c", BARE_PACKAGE + textwrap.dedent(start) + textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60.0,
        check=True,
    )


def test_everything_that_is_written_to_stdout_and_stderr_goes_to_the_file_c_code_included(tmp_path: Path) -> None:
    log_file = tmp_path / "rank_0.log"

    result = run(
        """
        print("python out")
        print("python err", file=sys.stderr)
        os.write(1, b"c out\\n")
        os.write(2, b"c err\\n")
        os.system("echo child out; echo child err >&2")
        """,
        log_file,
    )

    assert (result.stdout, result.stderr) == ("before\n", "")
    written = ["python out", "python err", "c out", "c err", "child out", "child err"]
    assert log_file.read_text().splitlines() == written


def test_the_runs_messages_go_to_the_screen_as_they_are_and_to_the_file_with_time_and_level(tmp_path: Path) -> None:
    result = run('configure_logging(screen)\nlogger.warning("low %s: θ \\udcff", "memory")', tmp_path / "log")

    assert result.stdout == "before\nlow memory: θ ?\n", "the screen takes any character"
    line = (tmp_path / "log").read_text()
    assert line.endswith(" WARNING low memory: θ \\udcff\n") and line[:2] == "20"


def test_messages_of_other_ranks_go_to_their_file_only(tmp_path: Path) -> None:
    result = run('configure_logging(None)\nlogger.info("rank 1")', tmp_path / "log")

    assert result.stdout == "before\n"
    assert (tmp_path / "log").read_text().endswith(" INFO rank 1\n")


def test_a_second_process_continues_the_file(tmp_path: Path) -> None:
    run('print("first")', tmp_path / "log")
    run('print("second")', tmp_path / "log")

    assert (tmp_path / "log").read_text() == "first\nsecond\n"


def test_a_crash_leaves_its_traceback_in_the_file_and_the_screen_is_not_inherited_by_children(tmp_path: Path) -> None:
    result = run(
        """
        assert not os.get_inheritable(screen.fileno())
        os.write(1, b"no newline at the end")
        try:
            raise ValueError("broken")
        except ValueError:
            import traceback
            traceback.print_exc()
        """,
        tmp_path / "log",
    )

    assert result.stderr == ""
    assert "ValueError: broken" in (tmp_path / "log").read_text()


def test_the_progress_line_counts_servers_only_while_one_is_out() -> None:
    names = ("weight_version", "reward_mean", "staleness_mean", "staleness_max", "clipped_share", "tokens_per_second")
    metrics = dict.fromkeys(names, 1.0) | {"servers_healthy": 3.0, "servers_quarantined": 0.0}

    assert "server" not in progress_line(1, 9, metrics, {})
    assert " | servers 3 of 4 | " in progress_line(1, 9, metrics | {"servers_quarantined": 1.0}, {})

"""The table of finished runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT


def write_run(folder: Path, accuracy: float, figures: dict[str, Any] | None = None, **settings: Any) -> Path:
    folder.mkdir()
    config = {"max_staleness": 2, "proximal": "loglinear", "seed": 0, "run_dir": str(folder), "data": {"task": "a"}}
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump(config | settings))
    summary = {
        "eval_accuracy_before": 0.25,
        "eval_accuracy_after": accuracy,
        "wall_seconds": 100.0,
        "mean_seconds_by_phase": {"train": 1.0},
        "proximal_share_of_training": 0.001,
        "max_abs_logprob_difference": 1e-6,
        "max_staleness_seen": 2,
    }
    (folder / "summary.json").write_text(json.dumps(summary | (figures or {})))
    return folder


def table(*folders: Path) -> tuple[list[str], str]:
    command = [sys.executable, "tools/compare_runs.py", *map(str, folders)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()[2:], done.stderr


def test_seeds_share_a_row_and_what_is_no_finished_run_is_left_out(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{seed}", 0.9 + 0.02 * seed, seed=seed) for seed in range(3)]
    (tmp_path / "evaluations").mkdir()
    rows, said = table(*runs, tmp_path / "evaluations")
    assert len(rows) == 1 and rows[0].startswith("| `max_staleness=2 proximal=loglinear` | 3 | 0.250 (0.250-0.250) |")
    assert "0.920 (0.900-0.940)" in rows[0] and f"{tmp_path}/evaluations is not a finished run" in said


def test_runs_with_other_settings_have_rows_of_their_own_which_say_what_differs(tmp_path: Path) -> None:
    rows, _ = table(write_run(tmp_path / "a", 0.9), write_run(tmp_path / "b", 0.5, data={"task": "b"}))
    names = [row.split("`")[1] for row in rows]
    assert names == [f"max_staleness=2 proximal=loglinear data.task={task}" for task in "ab"]


@pytest.mark.parametrize(("number", "shown"), [(0, "1.0e-06"), (1, "not finite")])
def test_a_run_without_a_finite_log_prob_difference_says_whether_there_was_none(
    number: int, shown: str, tmp_path: Path
) -> None:
    without = {"max_abs_logprob_difference": None, "nonfinite_logprob_differences": number}
    rows, _ = table(write_run(tmp_path / "a", 0.9, seed=1), write_run(tmp_path / "b", 0.9, without))
    assert rows[0].split(" | ")[-2] == shown
    assert number or table(tmp_path / "b")[0][0].split(" | ")[-2] == "-"


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    assert "error: none of these is a finished run" in table(tmp_path)[1]

"""tools/draw_learning_curve.py: the picture of the quickstart's page."""

import json
import sys
from pathlib import Path

import pytest

from tools.draw_learning_curve import main


def test_the_curve_of_a_run_is_an_svg_with_both_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": 0, "eval_accuracy": 0.25}, {"step": 1, "reward_mean": 0.5, "eval_accuracy": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    picture = tmp_path / "images" / "curve.svg"
    monkeypatch.setattr(sys, "argv", ["draw_learning_curve.py", str(tmp_path), str(picture)])
    assert main() == 0
    text = picture.read_text(encoding="utf-8")
    assert text.startswith("<svg") and "mean reward of the training batch" in text and "held-out" in text


def test_a_folder_without_a_run_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["draw_learning_curve.py", str(tmp_path), str(tmp_path / "curve.svg")])
    assert main() == 2
    assert str(tmp_path) in capsys.readouterr().err

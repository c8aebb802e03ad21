"""What a run leaves behind: metrics that survive a kill, a summary that adds up, a page that needs nothing else."""

import json
import logging
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from megatron_a3po.algorithm.advantage import compute_advantages
from megatron_a3po.config import CheckpointConfig, RunConfig
from megatron_a3po.runtime import report
from megatron_a3po.runtime.metrics import MetricsWriter, batch_metrics, read_metrics
from megatron_a3po.runtime.recorder import RunRecorder, complete_run, mean_seconds_by_phase, summarize_run
from megatron_a3po.runtime.report import write_report
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.types import FinishReason, Trajectory

LEDGER = {"issued": 4, "consumed": 3, "dropped": 1, "dropped_by_reason": {"<late>": 1}}
ROWS: list[dict[str, Any]] = [
    {"step": 0, "eval_accuracy": 0.25, "logprob_difference_max": 3e-6, "seconds": 9.0, "seconds/evaluate": 8.0},
    {
        "step": 1,
        "reward_mean": 0.5,
        "staleness_mean": 1.0,
        "staleness_max": 1.0,
        "importance_weight_max": 1.5,
        "logprob_difference_max": 7e-6,
        "proximal_seconds": 0.25,
        "tokens_per_second": 100.0,
        "seconds/train": 2.0,
        "seconds/publish": 1.0,
        "seconds/publish/gather": 0.5,
    },
    {
        "step": 2,
        "reward_mean": 0.75,
        "staleness_mean": 2.0,
        "staleness_max": 3.0,
        "importance_weight_max": None,
        "eval_accuracy": 0.5,
        "proximal_seconds": 0.75,
        "tokens_per_second": 300.0,
        "seconds/train": 3.0,
        "seconds/publish": 2.0,
        "seconds/publish/gather": 1.0,
        "seconds/evaluate": 4.0,
    },
]
STEP = {name: value for name, value in ROWS[1].items() if name != "step"} | {
    "loss_tokens": 50.0,
    "weight_version": 1,
    "clipped_share": 0.0,
    "zero_advantage_share": 0.0,
}


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run <b>&"
    folder.mkdir()
    write_rows(folder, ROWS)
    (folder / "config.resolved.yaml").write_text("prompt_pattern: '<script>alert(\"&\")</script>'\nseed: 7\n")
    (folder / "summary.json").write_text(json.dumps(summarize_run(ROWS, LEDGER, wall_seconds=12.5)))
    return folder


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take long to draw."""
    monkeypatch.setattr(report, "_picture", lambda rows, draw: "<svg></svg>")


def test_the_summary_is_what_one_computes_by_hand() -> None:
    assert summarize_run(ROWS, LEDGER, wall_seconds=12.5) == {
        "num_steps": 2,
        "wall_seconds": 12.5,
        "eval_accuracy_before": 0.25,
        "eval_accuracy_after": 0.5,
        "max_staleness_seen": 3,
        "mean_staleness": 1.5,
        "max_abs_logprob_difference": 7e-6,
        "nonfinite_logprob_differences": 0,
        "proximal_share_of_training": 0.2,
        "mean_seconds_by_phase": {"train": 2.5, "publish": 1.5, "publish/gather": 0.75, "evaluate": 2.0},
        "mean_tokens_per_second": 200.0,
        "ledger": LEDGER,
    }


def test_a_run_without_steps_has_a_summary_with_nothing_in_it() -> None:
    summary = summarize_run([], {}, wall_seconds=1.0)

    assert (summary["num_steps"], summary["max_staleness_seen"], summary["mean_seconds_by_phase"]) == (0, 0, {})
    assert summary["eval_accuracy_after"] is summary["max_abs_logprob_difference"] is None
    assert mean_seconds_by_phase([]) == {}


@pytest.mark.usefixtures("without_pictures")
def test_a_difference_from_the_servers_that_was_not_finite_is_no_small_one_in_the_summary(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    recorder = RunRecorder(configuration(run, num_steps=3), rank=0, timer=PhaseTimer())
    recorder.start({"logprob_difference_max": 1e-6}, {"eval_accuracy": 0.25})
    for step, difference in enumerate([2e-6, math.inf, 1e-6], 1):
        recorder.step(step, STEP | {"logprob_difference_max": difference})
    recorder.finish(LEDGER)
    summary = json.loads((run / "summary.json").read_text(), parse_constant=fail)

    assert summary["max_abs_logprob_difference"] is None and summary["nonfinite_logprob_differences"] == 1


def test_numbers_that_json_lacks_become_null_and_every_line_is_strict_json(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"nan": math.nan, "up": math.inf, "down": -math.inf, "real": 0.1, "whole": 3})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: a killed run has it too

    assert json.loads(lines[0], parse_constant=fail) == {
        "step": 0, "nan": None, "up": None, "down": None, "real": 0.1, "whole": 3
    }  # fmt: skip
    writer.write(1, {"real": 0.2})
    writer.close()
    assert [row["real"] for row in read_metrics(tmp_path)] == [0.1, 0.2]
    assert list((tmp_path / "tensorboard").iterdir())


def fail(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize("length", [1, 10, 24])
def test_a_last_line_torn_by_a_kill_is_left_out(tmp_path: Path, length: int) -> None:
    write_rows(tmp_path, ROWS)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward_mean": 0.5}'[:length])

    assert read_metrics(tmp_path) == ROWS


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": \n{"step": 2}\n')

    with pytest.raises(ValueError):
        read_metrics(tmp_path)


class Page(HTMLParser):
    """Collects tags and whatever makes a browser load something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [f"{tag} {name}={value}" for name, value in attrs if value and self.loads(name, value)]

    @staticmethod
    def loads(name: str, value: str) -> bool:
        return name in ("src", "href", "xlink:href", "srcset", "data") and not value.startswith("#")


def test_the_report_needs_nothing_from_elsewhere_and_its_pictures_are_well_formed(run: Path) -> None:
    text = write_report(run).read_text(encoding="utf-8")
    page = Page()
    page.feed(text)

    assert page.loaded == []
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert re.findall(r"\w+://\S+|@import", without_namespaces) == []
    assert page.tags.count("svg") == 3 and "script" not in page.tags and "link" not in page.tags

    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    texts = ["".join(ElementTree.fromstring(picture).itertext()) for picture in pictures]
    assert len(texts) == 3 and all("step" in text for text in texts)
    assert "held-out sampled accuracy" in texts[0] and "staleness, oldest token" in texts[1] and "publish" in texts[2]
    assert "publish/gather" not in texts[2], "a part of a phase would be stacked on the phase that has it"


@pytest.mark.usefixtures("without_pictures")
def test_the_report_shows_configuration_and_summary_as_text_not_as_markup(run: Path) -> None:
    text = write_report(run).read_text(encoding="utf-8")

    assert "prompt_pattern: &#x27;&lt;script&gt;alert(&quot;&amp;&quot;)&lt;/script&gt;&#x27;\nseed: 7" in text
    assert "<title>A-3PO run run &lt;b&gt;&amp;</title>" in text and "<b>" not in text
    assert "<td>ledger / dropped_by_reason / &lt;late&gt;</td><td>1</td>" in text
    assert "<td>mean_staleness</td><td>1.5</td>" in text
    assert "The run has not ended" not in text


@pytest.mark.parametrize("rows", [[], ROWS[:1], ROWS])
def test_a_run_that_goes_on_has_a_report_too(run: Path, rows: list[dict[str, Any]]) -> None:
    write_rows(run, rows)
    (run / "summary.json").unlink()

    page = write_report(run).read_text()
    assert f"{max(0, len(rows) - 1)} steps; the run goes on or was interrupted." in page and "Summary" not in page


@pytest.mark.usefixtures("without_pictures")
def test_the_recorder_writes_steps_summary_and_report_on_rank_0_and_nothing_elsewhere(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "summary.json").unlink()
    for rank in (1, 0):
        timer = PhaseTimer()
        recorder = RunRecorder(configuration(run, num_steps=1), rank=rank, timer=timer)
        recorder.message("starting")
        recorder.start({}, {"eval_accuracy": 0.25})
        with timer.phase("train"):
            pass
        recorder.step(1, STEP | {"eval_accuracy": 0.5})
        recorder.finish(LEDGER)
        assert (run / "summary.json").exists() is (run / "report.html").exists() is (rank == 0)
    rows = read_metrics(run)

    assert [row["step"] for row in rows] == [0, 1]
    assert rows[1]["tokens_per_second"] == pytest.approx(50.0 / rows[1]["seconds"])
    assert 0 <= rows[1]["seconds/train"] <= rows[1]["seconds"] <= rows[1]["wall_seconds"]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["num_steps"], summary["eval_accuracy_before"], summary["eval_accuracy_after"]) == (1, 0.25, 0.5)


@pytest.mark.usefixtures("without_pictures")
def test_a_run_that_was_killed_after_its_last_checkpoint_gets_its_summary_and_report(run: Path) -> None:
    rows = [row | {"wall_seconds": 12.5} for row in ROWS]
    write_rows(run, rows)
    whole = json.loads((run / "summary.json").read_text())
    complete_run(run)
    assert json.loads((run / "summary.json").read_text()) == whole, "it was there, with its ledger"

    (run / "report.html").unlink()
    (run / "summary.json").write_text(json.dumps(whole | {"num_steps": 1}))  # of the run before num_steps were raised
    complete_run(run)
    assert json.loads((run / "summary.json").read_text()) == whole | {"ledger": {}}
    (run / "summary.json").write_text('{"num_st')  # torn
    complete_run(run)
    assert json.loads((run / "summary.json").read_text()) == whole | {"ledger": {}}
    (run / "summary.json").unlink()
    complete_run(run)
    assert json.loads((run / "summary.json").read_text()) == whole | {"ledger": {}}
    assert (run / "report.html").exists()


def test_exports_are_due_on_schedule_and_the_model_after_the_last_step() -> None:
    config = CheckpointConfig(export_every_steps=2)
    assert [config.exports(step, 4) for step in range(1, 5)] == [
        [],
        ["exports/step_00000002"],
        [],
        ["exports/step_00000004", "model"],
    ]
    assert CheckpointConfig().exports(4, 4) == ["model"] and CheckpointConfig().exports(3, 4) == []


HALF, ALL = [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("method", "batches"),
    [
        ("grpo", [HALF, ALL, [1.0, 0.5, 0.0, 0.0], HALF, ALL, HALF, HALF]),
        # Not relative to groups: it learns from groups that differ from each other.
        ("reinforce_pp", [ALL, ALL, HALF, ALL, ALL, ALL, ALL]),
    ],
)
def test_rewards_that_teach_nothing_for_several_steps_give_a_warning_and_other_steps_start_again(
    method: Any,
    batches: list[list[float]],
    run: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron_a3po"), "propagate", True)
    config = configuration(run, num_steps=9, algorithm={"zero_variance_alarm_steps": 3})
    recorder = RunRecorder(config, rank=0, timer=PhaseTimer())
    recorder.start({}, {"eval_accuracy": 0.25})
    for step, rewards in enumerate(batches, 1):
        advantages = compute_advantages(torch.tensor(rewards), torch.tensor([0, 0, 1, 1]), method)
        batch = [trajectory(reward, [0], FinishReason.STOP) for reward in rewards]
        recorder.step(step, STEP | batch_metrics(batch, advantages, version=0))
        warned = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warned) == (step >= 6)


def test_a_resumed_run_has_every_step_once(run: Path) -> None:
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "eval_accuracy": 0.5, "wall_seconds": 100.0 * step}) + "\n" for step in range(6)
        )
    )
    recorder = RunRecorder(configuration(run, num_steps=9), rank=0, timer=PhaseTimer(), resumed_step=3)
    assert len(read_metrics(run)) == 6, "the checkpoint is not loaded yet"
    recorder.start({}, None)
    recorder.step(4, STEP)

    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert 300.0 < rows[4]["wall_seconds"] < 400.0, "after those of the processes before"


def test_a_run_that_goes_on_from_a_checkpoint_of_another_run_counts_its_own_seconds(run: Path) -> None:
    (run / "metrics.jsonl").unlink(missing_ok=True)
    assert read_metrics(run) == []
    recorder = RunRecorder(configuration(run, num_steps=9), rank=0, timer=PhaseTimer(), resumed_step=3)
    recorder.start({}, None)
    recorder.step(4, STEP)

    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [4]
    assert rows[0]["wall_seconds"] < 100.0


def configuration(run: Path, **settings: Any) -> RunConfig:
    return RunConfig.model_validate({"model": run, "run_dir": run, "data": {"task": "-"}, **settings})


def trajectory(reward: float, versions: list[int], reason: FinishReason) -> Trajectory:
    return Trajectory(
        prompt_id="p",
        group_id=0,
        token_ids=torch.arange(2 + len(versions)),
        prompt_length=2,
        behaviour_logprobs=torch.zeros(len(versions)),
        weight_versions=torch.tensor(versions),
        reward=reward,
        finish_reason=reason,
    )


def test_the_metrics_of_a_batch_are_what_one_computes_by_hand() -> None:
    batch = [trajectory(1.0, [5, 5, 6, 7], FinishReason.LENGTH), trajectory(0.5, [7, 7], FinishReason.STOP)]
    advantages = compute_advantages(torch.tensor([1.0, 0.5]), torch.tensor([0, 0]))

    assert batch_metrics(batch, advantages, version=7) == pytest.approx(
        {
            "weight_version": 8,
            "reward_mean": 0.75,
            "reward_std": 0.125**0.5,
            "staleness_mean": 5 / 6,
            "staleness_max": 2,
            "num_groups": 1,
            "zero_variance_groups": 0,
            "zero_advantage_share": 0.0,
            "response_length_mean": 3.0,
            "length_limit_share": 0.5,
            "mixed_version_share": 0.5,
            "staleness_share/0": 0.5,
            "staleness_share/1": 1 / 6,
            "staleness_share/2": 1 / 3,
        }
    )

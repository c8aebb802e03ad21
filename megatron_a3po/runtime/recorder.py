"""Record a run: a line and metrics per step, and a summary and a report at the end."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_a3po.config import RunConfig
from megatron_a3po.runtime.files import write_durably
from megatron_a3po.runtime.logging import logger, progress_line
from megatron_a3po.runtime.metrics import MetricsWriter, read_metrics
from megatron_a3po.runtime.report import write_report
from megatron_a3po.runtime.run_dir import truncate_metrics
from megatron_a3po.runtime.timing import PhaseTimer

_SUMMARY_FILE = "summary.json"


class RunRecorder:
    """The record of a run. On ranks other than 0, its methods write nothing."""

    def __init__(self, config: RunConfig, *, rank: int, timer: PhaseTimer, resumed_step: int = 0) -> None:
        self._run_dir = config.run_dir
        self._num_steps = config.num_steps
        self._timer = timer
        self._alarm_steps = config.algorithm.zero_variance_alarm_steps
        self._steps_without_advantage = 0
        self._resumed_step = resumed_step
        self._rank = rank
        self._writer: MetricsWriter | None = None
        self._earlier_seconds = 0.0
        self._start = time.perf_counter()
        self._step_start = self._start

    def message(self, text: str) -> None:
        """Log progress outside steps, with the seconds since the start."""
        if self._rank == 0:
            logger.info("%6.1f s  %s", time.perf_counter() - self._start, text)

    def start(self, metrics: Mapping[str, float], evaluation: Mapping[str, float] | None) -> None:
        """Record the state before training as step 0, or say where a resumed run, which has no evaluation, continues.

        Removes the rows of steps after the resumed one. Call it when the checkpoint is loaded.
        """
        if self._rank == 0:
            resumed = self._resumed_step > 0
            truncate_metrics(self._run_dir, self._resumed_step if resumed else -1)
            self._earlier_seconds = _seconds_so_far(read_metrics(self._run_dir)) if resumed else 0.0
            self._writer = MetricsWriter(self._run_dir, first_step=self._resumed_step + 1 if resumed else 0)
        if evaluation is not None:
            self.step(0, {**metrics, **evaluation})
            return
        self._step_start = time.perf_counter()
        self._timer.take()
        self.message(f"resumed: step {self._resumed_step} is published again")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step with the seconds of its phases; step 0 is the state before training."""
        seconds, now = self._timer.take(), time.perf_counter()
        elapsed, self._step_start = now - self._step_start, now
        if self._writer is None:
            return
        row = dict(metrics)
        row |= {"seconds": elapsed, "wall_seconds": self._earlier_seconds + now - self._start}
        row |= {f"seconds/{name}": value for name, value in seconds.items()}
        if step == 0:
            self.message(f"version 0 is published; held-out accuracy before training {metrics['eval_accuracy']:.3f}")
        else:
            row["tokens_per_second"] = metrics["loss_tokens"] / elapsed
            logger.info("%s", progress_line(step, self._num_steps, row, seconds))
            self._watch_rewards(metrics)
        self._writer.write(step, row)

    def _watch_rewards(self, metrics: Mapping[str, float]) -> None:
        """Warn when no step had an advantage for a while: a broken reward function looks like that."""
        nothing = metrics["zero_advantage_share"] == 1
        self._steps_without_advantage = self._steps_without_advantage + 1 if nothing else 0
        if self._steps_without_advantage and self._steps_without_advantage % self._alarm_steps == 0:
            logger.warning(
                "WARNING: in %d steps in a row equal rewards (mean %.3f) left every advantage 0, so nothing was "
                "learned; is the reward right, and the task neither too easy nor too hard?",
                self._steps_without_advantage,
                metrics["reward_mean"],
            )

    def finish(self, ledger: Mapping[str, Any]) -> None:
        """Write `summary.json` and `report.html`, and log where everything is."""
        if self._writer is None:
            return
        self._writer.close()
        rows = read_metrics(self._run_dir)
        summary = summarize_run(rows, ledger, wall_seconds=self._earlier_seconds + time.perf_counter() - self._start)
        write_durably(self._run_dir / _SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
        write_report(self._run_dir)
        logger.info(
            "\nheld-out accuracy %.3f -> %.3f in %d steps, %.0f s\n"
            "  learning curve   %s\n  summary          %s\n  metrics          %s\n"
            "  trained model    %s\n  TensorBoard      %s --logdir %s\n  logs             %s",
            *(summary["eval_accuracy_before"], summary["eval_accuracy_after"], summary["num_steps"]),
            *(summary["wall_seconds"], self._run_dir / "report.html", self._run_dir / _SUMMARY_FILE),
            *(self._run_dir / "metrics.jsonl", self._run_dir / "model", Path(sys.executable).parent / "tensorboard"),
            *(self._run_dir / "tensorboard", self._run_dir / "logs"),
        )


def complete_run(run_dir: Path) -> None:
    """Write the summary and report of a run that was killed between its last checkpoint and its end.

    The summary does not have the ledger, which is lost.
    """
    rows, file = read_metrics(run_dir), run_dir / _SUMMARY_FILE
    if not rows:
        return
    summary = summarize_run(rows, {}, wall_seconds=rows[-1]["wall_seconds"])
    # A summary of fewer steps is that of the run before its num_steps were raised.
    if _summarized_steps(file) != summary["num_steps"]:
        write_durably(file, json.dumps(summary, indent=2) + "\n")
    write_report(run_dir)


def _seconds_so_far(rows: list[dict[str, Any]]) -> float:
    """Return the seconds of the processes that made these steps, each from its start to its last step."""
    return max((row.get("wall_seconds", 0.0) for row in rows), default=0.0)


def _summarized_steps(file: Path) -> int | None:
    """Return the steps of the summary; None if there is none, or it cannot be read."""
    try:
        return int(json.loads(file.read_bytes())["num_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def summarize_run(rows: list[dict[str, Any]], ledger: Mapping[str, Any], *, wall_seconds: float) -> dict[str, Any]:
    """Compute the figures by which a run is judged from its metrics.

    `max_abs_logprob_difference` is null without a comparison with the servers, and if a difference was not finite.
    """
    steps = [row for row in rows if row["step"] > 0]
    accuracies = [row["eval_accuracy"] for row in rows if row.get("eval_accuracy") is not None]
    differences = [row["logprob_difference_max"] for row in rows if "logprob_difference_max" in row]
    num_nonfinite = differences.count(None)
    seconds = mean_seconds_by_phase(steps)
    training = seconds.get("train", 0.0)
    return {
        "num_steps": len(steps),
        "wall_seconds": wall_seconds,
        "eval_accuracy_before": accuracies[0] if accuracies else None,
        "eval_accuracy_after": accuracies[-1] if accuracies else None,
        "max_staleness_seen": max((int(row["staleness_max"]) for row in steps), default=0),
        "mean_staleness": _mean([row["staleness_mean"] for row in steps]),
        "max_abs_logprob_difference": None if num_nonfinite else max(differences, default=None),
        "nonfinite_logprob_differences": num_nonfinite,
        "proximal_share_of_training": _mean([row["proximal_seconds"] for row in steps]) / training
        if training
        else None,
        "mean_seconds_by_phase": seconds,
        "mean_tokens_per_second": _mean([row["tokens_per_second"] for row in steps]),
        "ledger": dict(ledger),
    }


def mean_seconds_by_phase(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean seconds per step of each phase, in order of first use; a phase that a step lacks counts as 0."""
    names = dict.fromkeys(name for row in steps for name in row if name.startswith("seconds/"))
    return {name.removeprefix("seconds/"): sum(row.get(name) or 0.0 for row in steps) / len(steps) for name in names}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""Settings of the runs of tools/study_staleness.py, their results as JSON lines, and a table and a picture of these."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_a3po.errors import ConfigError

RUNS_FILE, TABLE_FILE, PLOT_FILE = "runs.jsonl", "results.md", "accuracy.svg"
TARGET_ACCURACY = 0.9

# Everything that the study compares, or that its figures rest on, is fixed here, whatever the defaults become.
COMMON = {
    "proximal": "loglinear",
    "algorithm.behaviour_weight": "inverse",
    "algorithm.fresh_anchor": "target",
    "algorithm.clip_epsilon_low": "0.2",
    "algorithm.clip_epsilon_high": "0.2",
    "algorithm.dual_clip": "null",
    "algorithm.weight_cap": "5.0",
    "algorithm.weight_cap_mode": "mask",
    "algorithm.advantage": "grpo",
}
SYNC = "sync"
OBJECTIVES: dict[str, dict[str, str]] = {
    SYNC: {},  # the only one at staleness 0, where they all are the same
    "recompute": {"proximal": "recompute"},
    "a3po": {},
    "a3po-inverse-sqrt": {"algorithm.behaviour_weight": "inverse_sqrt"},
    "a3po-constant": {"algorithm.behaviour_weight": "0.5"},
    "a3po-dual-clip": {"algorithm.dual_clip": "3.0"},
    "ppo": {"proximal": "behaviour"},  # ignores staleness
}
METRICS = (
    "importance_weight_max",
    "ratio_max",
    "clipped_low_share",
    "clipped_high_share",
    "dual_clipped_share",
    "clipped_share",
    "capped_share",
    "kl_k3",
    "effective_sample_share",
    "fresh_logprob_difference_max",
    "gradient_norm",
)
"""What is kept of a step's metrics"""

_HEADER = """\
# Accuracy under simulated staleness

Written by `python tools/study_staleness.py` from {num_runs} runs of {num_steps} steps; what is simulated, and
what is not, stands in that file. Every cell is the mean over the seeds and, in brackets, the worst seed.

* *final*: share of right answers among samples for held-out words after the last step, one sample per word;
* *worst drop*: the largest fall of that share below what it had been before;
* *steps to {target}*: the first evaluation that reached it (there is one every {every} steps);
* *max weight*: the largest pi_proximal / pi_behaviour of any token, before the cap;
* *clipped*: share of the tokens without gradient because of the clip band, mean over the steps;
* *max gradient norm*: before clipping; *CPU seconds*: of the run, evaluations included.

At staleness 1 both `a3po` (1/d) and `a3po-inverse-sqrt` give the behaviour policy the weight 1: they *are* `ppo`.

![Held-out accuracy over training steps]({plot})
"""
_COLUMNS = ("final", "worst drop", f"steps to {TARGET_ACCURACY}", "max weight", "clipped", "max gradient norm")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RunSettings(_Record):
    objective: str
    staleness: int
    learning_rate: float
    seed: int
    num_steps: int

    def overrides(self) -> list[str]:
        """What differs from the quickstart's configuration, as `key=value`."""
        values = {
            "seed": str(self.seed),
            "num_steps": str(self.num_steps),
            "max_staleness": str(self.staleness),
            "optimizer.learning_rate": f"{self.learning_rate:.10f}",  # YAML takes 5e-05 for a string
            **COMMON,
            **OBJECTIVES[self.objective],
        }
        return [f"{key}={value}" for key, value in values.items()]

    def __str__(self) -> str:
        return f"{self.objective}  staleness {self.staleness}  lr {self.learning_rate:g}  seed {self.seed}"


class Spread(_Record):
    """Of one metric over the steps of a run."""

    mean: float
    minimum: float
    maximum: float


class RunRecord(_Record):
    """One line of `runs.jsonl`."""

    settings: RunSettings
    weights: str
    """Digest of the starting weights"""
    cpu_seconds: float
    accuracy: dict[int, float]
    """Training step -> share of right answers among held-out samples"""
    metrics: dict[str, Spread]

    def __str__(self) -> str:
        return (
            f"{self.settings}: final {self.final_accuracy:.3f}, worst drop {self.worst_drop:.3f}, "
            f"{self.cpu_seconds:.1f} CPU seconds"
        )

    @property
    def final_accuracy(self) -> float:
        return self.accuracy[max(self.accuracy)]

    @property
    def worst_drop(self) -> float:
        """The largest fall from a running maximum."""
        best = worst = 0.0
        for step in sorted(self.accuracy):
            best = max(best, self.accuracy[step])
            worst = max(worst, best - self.accuracy[step])
        return worst

    @property
    def steps_to_target(self) -> int | None:
        return min((step for step, value in self.accuracy.items() if value >= TARGET_ACCURACY), default=None)


def spreads(steps: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Return the summary of the metrics of all steps of a run."""
    columns = {name: [step[name] for step in steps] for name in METRICS}
    return {
        name: Spread(mean=statistics.mean(column), minimum=min(column), maximum=max(column))
        for name, column in columns.items()
    }


def read_runs(file: Path) -> list[RunRecord]:
    """Return the finished runs; remove a last line from the file that an interruption cut."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    whole, newline, torn = text.rpartition("\n")
    if torn:
        file.write_text(whole + newline, encoding="utf-8")
    records = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            records.append(RunRecord.model_validate_json(line))
        except ValidationError as error:
            raise ConfigError(
                f"{file}, line {number}, is no run of this study ({error.errors()[0]['msg']}): "
                "remove the file, or pass another --output"
            ) from error
    return records


def append_run(file: Path, record: RunRecord) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(record.model_dump_json() + "\n")


def write_report(folder: Path, runs: Sequence[RunRecord]) -> None:
    """Write `results.md` and `accuracy.svg` for runs with the same number of steps."""
    _draw(folder / PLOT_FILE, runs)
    steps = sorted(runs[0].accuracy)
    page = _HEADER.format(
        num_runs=len(runs), num_steps=steps[-1], target=TARGET_ACCURACY, every=steps[1] - steps[0], plot=PLOT_FILE
    )
    for learning_rate in _values(runs, lambda run: run.settings.learning_rate):
        page += f"\n## Learning rate {learning_rate:g}\n\n| staleness | objective | "
        page += " | ".join((*_COLUMNS, "CPU seconds")) + " |\n|" + "---|" * (len(_COLUMNS) + 3) + "\n"
        at_rate = [run for run in runs if run.settings.learning_rate == learning_rate]
        for staleness in _values(at_rate, lambda run: run.settings.staleness):
            for objective in OBJECTIVES:
                found = _select(at_rate, objective, staleness)
                if found:
                    page += f"| {staleness} | {objective} | {' | '.join(_cells(found))} |\n"
    (folder / TABLE_FILE).write_text(page, encoding="utf-8")


def _values(runs: Sequence[RunRecord], key: Callable[[RunRecord], float]) -> list[float]:
    return sorted({key(run) for run in runs})


def _select(runs: Sequence[RunRecord], objective: str, staleness: float) -> list[RunRecord]:
    return [run for run in runs if run.settings.objective == objective and run.settings.staleness == staleness]


def _cells(runs: list[RunRecord]) -> list[str]:
    """The table's cells on the runs of all seeds."""
    largest = {name: [run.metrics[name].maximum for run in runs] for name in ("importance_weight_max", "gradient_norm")}
    reached = [run.steps_to_target for run in runs if run.steps_to_target is not None]
    worst = "never" if len(reached) < len(runs) else str(max(reached))
    return [
        _cell([run.final_accuracy for run in runs], min, "{:.3f}"),
        _cell([run.worst_drop for run in runs], max, "{:.3f}"),
        f"{statistics.mean(reached):.0f} ({worst})" if reached else "never",
        _cell(largest["importance_weight_max"], max, "{:.3g}"),
        _cell([run.metrics["clipped_share"].mean for run in runs], max, "{:.1%}"),
        _cell(largest["gradient_norm"], max, "{:.2g}"),
        f"{statistics.mean(run.cpu_seconds for run in runs):.1f}",
    ]


def _cell(values: list[float], worst: Callable[[list[float]], float], form: str) -> str:
    return f"{form.format(statistics.mean(values))} ({form.format(worst(values))})"


def _draw(file: Path, runs: Sequence[RunRecord]) -> None:
    """Staleness x learning rate; the synchronous runs stand in every panel."""
    rates = _values(runs, lambda run: run.settings.learning_rate)
    rows = [value for value in _values(runs, lambda run: run.settings.staleness) if value > 0] or [0]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "staleness", "font.size": 9}):
        figure = Figure(figsize=(5 * len(rates), 2.6 * len(rows) + 0.6), layout="constrained")
        grid = figure.subplots(len(rows), len(rates), sharex=True, sharey=True, squeeze=False)
        for staleness, line in zip(rows, grid, strict=True):
            for learning_rate, axes in zip(rates, line, strict=True):
                at_rate = [run for run in runs if run.settings.learning_rate == learning_rate]
                axes.set_title(f"staleness {staleness:g}, learning rate {learning_rate:g}", fontsize=9)
                axes.spines[["top", "right"]].set_visible(False)
                for number, objective in enumerate(OBJECTIVES):
                    fresh = _select(at_rate, objective, 0)
                    _draw_line(axes, fresh or _select(at_rate, objective, staleness), objective, number, bool(fresh))
        grid[-1, 0].set_xlabel("training step")
        grid[0, 0].set_ylabel("held-out accuracy")
        handles: dict[str, Artist] = {}
        for axes in grid.flat:
            handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))


def _draw_line(axes: Axes, runs: list[RunRecord], label: str, number: int, is_reference: bool) -> None:
    """The mean over the seeds, in a band from the worst to the best of them."""
    if not runs:
        return
    steps = sorted(runs[0].accuracy)
    values = [[run.accuracy[step] for run in runs] for step in steps]
    color = "black" if is_reference else f"C{number}"
    axes.plot(
        steps, [statistics.mean(v) for v in values], "--" if is_reference else "-", color=color, label=label, lw=1.2
    )
    axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.12, lw=0)

"""Write `report.html`: one run on one page that loads nothing from elsewhere."""

import html
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_a3po.runtime.metrics import read_metrics

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
svg { width: 100%; height: auto }
table { border-collapse: collapse } td { padding: .15rem 1.5rem .15rem 0; border-bottom: 1px solid #ddd }
td + td { font-variant-numeric: tabular-nums } pre { background: #f6f6f6; padding: 1rem; overflow-x: auto }
"""


def write_report(run_dir: Path) -> Path:
    """Write the page from `metrics.jsonl`, `config.resolved.yaml` and, if there is one, `summary.json`."""
    rows = read_metrics(run_dir)
    summary_file = run_dir / "summary.json"
    summary = json.loads(summary_file.read_text(encoding="utf-8")) if summary_file.exists() else {}
    config = (run_dir / "config.resolved.yaml").read_text(encoding="utf-8")
    title = html.escape(f"A-3PO run {run_dir.name}")
    page = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>
<h1>{title}</h1>
<p>{html.escape(_headline(rows, summary))}</p>
<h2>Learning curve</h2>
{_picture(rows, _draw_learning_curve)}
<h2>Staleness, and what the loss did with it</h2>
{_picture(rows, _staleness)}
<h2>Seconds of each step by phase</h2>
{_picture(rows, _seconds)}
{"<h2>Summary</h2>" if summary else ""}
<table>{"".join(_table_rows(summary))}</table>
<h2>Configuration</h2>
<pre>{html.escape(config)}</pre>
</html>
"""
    path = run_dir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def learning_curve(run_dir: Path) -> str:
    """Return the learning curve of a run as an SVG file's text."""
    return _picture(read_metrics(run_dir), _draw_learning_curve)


def _picture(rows: list[dict[str, Any]], draw: Callable[[list[dict[str, Any]], Axes], None]) -> str:
    """Return an inline SVG whose text stays text."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 10}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        axes = figure.add_subplot()
        draw(rows, axes)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _headline(rows: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    if not summary:
        return f"{sum(row['step'] > 0 for row in rows)} steps; the run goes on or was interrupted."
    before, after = summary["eval_accuracy_before"], summary["eval_accuracy_after"]
    return (
        f"Held-out sampled accuracy {before:.3f} before and {after:.3f} after {summary['num_steps']} steps in "
        f"{summary['wall_seconds']:.0f} s; no token older than {summary['max_staleness_seen']} versions."
    )


def _series(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _draw_learning_curve(rows: list[dict[str, Any]], axes: Axes) -> None:
    axes.plot(*_series(rows, "reward_mean"), color="#9bb8d3", label="mean reward of the training batch")
    axes.plot(*_series(rows, "eval_accuracy"), "o-", color="#c0392b", label="held-out sampled accuracy")
    axes.set_ylim(0, 1.02)


def _staleness(rows: list[dict[str, Any]], axes: Axes) -> None:
    axes.plot(*_series(rows, "staleness_max"), color="#7f8c8d", label="staleness, oldest token [versions]")
    axes.plot(*_series(rows, "staleness_mean"), color="#2c3e50", label="staleness, mean [versions]")
    axes.plot(*_series(rows, "importance_weight_max"), color="#e67e22", label="importance weight, maximum")
    axes.set_ylim(bottom=0)


def _seconds(rows: list[dict[str, Any]], axes: Axes) -> None:
    steps = [row for row in rows if row["step"] > 0]
    names = dict.fromkeys(key for row in steps for key in row if key.startswith("seconds/") and key.count("/") == 1)
    if steps and names:
        values = [[row.get(name) or 0.0 for row in steps] for name in names]
        labels = [name.removeprefix("seconds/") for name in names]
        axes.stackplot([row["step"] for row in steps], *values, labels=labels, alpha=0.85)


def _table_rows(values: dict[str, Any], prefix: str = "") -> list[str]:
    lines: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += _table_rows(value, f"{prefix}{name} / ")
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            lines.append(f"<tr><td>{html.escape(prefix + name)}</td><td>{html.escape(shown)}</td></tr>")
    return lines

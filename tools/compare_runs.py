"""Print a Markdown table of finished runs, with one row per configuration over its seeds.

    python tools/compare_runs.py runs/readme/*

Runs whose configurations differ only in seed, run_dir and servers share a row, which shows the mean and, in brackets,
the lowest and highest value.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

PHASES = ("wait", "train", "publish", "verify", "evaluate")


NOT_COMPARED = ("seed", "run_dir", "rollout.servers")


def settings(run_dir: Path) -> dict[str, str]:
    """Return the settings by key, without those in which runs of one row may differ."""
    config = yaml.safe_load((run_dir / "config.resolved.yaml").read_text(encoding="utf-8"))
    return {key: value for key, value in flat(config).items() if key not in NOT_COMPARED}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: str(value)}
    return found


def group_runs(run_dirs: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """Return summaries by the name of their row: staleness, proximal policy, and every other setting that differs."""
    runs = []
    for run_dir in run_dirs:
        try:
            runs.append((settings(run_dir), json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))))
        except (FileNotFoundError, NotADirectoryError) as error:
            print(f"left out: {run_dir} is not a finished run ({error.filename} is missing)", file=sys.stderr)
    everything = {key for config, _ in runs for key in config}
    differing = {key for key in everything if len({config.get(key) for config, _ in runs}) > 1}
    named = ["max_staleness", "proximal", *sorted(differing - {"max_staleness", "proximal"})]
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for config, summary in runs:
        groups[" ".join(f"{key}={config.get(key)}" for key in named)].append(summary)
    return groups


def over_seeds(values: list[float], form: str) -> str:
    shown = format(statistics.fmean(values), form)
    return shown if len(values) == 1 else f"{shown} ({format(min(values), form)}-{format(max(values), form)})"


def largest_difference(summaries: list[dict[str, Any]]) -> str:
    """Return the largest log-prob difference between trainer and servers; without verification there is none."""
    if any(summary.get("nonfinite_logprob_differences") for summary in summaries):
        return "not finite"
    differences = [summary["max_abs_logprob_difference"] for summary in summaries]
    known = [difference for difference in differences if difference is not None]
    return f"{max(known):.1e}" if known else "-"


def row(name: str, summaries: list[dict[str, Any]]) -> list[str]:
    def column(key: str, form: str) -> str:
        return over_seeds([summary[key] for summary in summaries], form)

    phases = [summary["mean_seconds_by_phase"] for summary in summaries]
    return [
        f"`{name}`",
        str(len(summaries)),
        column("eval_accuracy_before", ".3f"),
        column("eval_accuracy_after", ".3f"),
        column("wall_seconds", ".0f"),
        *(over_seeds([seconds.get(phase, 0.0) for seconds in phases], ".2f") for phase in PHASES),
        column("proximal_share_of_training", ".2%"),
        largest_difference(summaries),
        f"{max(summary['max_staleness_seen'] for summary in summaries)}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="+", type=Path)
    groups = group_runs(parser.parse_args().run_dirs)
    if not groups:
        print("error: none of these is a finished run", file=sys.stderr)
        return 2
    header = ["settings", "seeds", "accuracy before", "after", "seconds", *(f"{phase} [s/step]" for phase in PHASES)]
    header += ["proximal share of training", "largest log-prob difference", "oldest token"]
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for name, summaries in groups.items():
        print("| " + " | ".join(row(name, summaries)) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

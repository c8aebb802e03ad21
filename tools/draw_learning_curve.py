"""Draw the learning curve of a run as an SVG.

    python tools/draw_learning_curve.py runs/tiny_cpu/20261130-093512 docs/images/quickstart.svg

The picture is the first one of the run's report.html: mean reward of each training batch, and held-out accuracy.
"""

import argparse
import sys
from pathlib import Path

from megatron_a3po.runtime.report import learning_curve


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("output", type=Path, help="SVG file to write")
    options = parser.parse_args()
    if not (options.run_dir / "metrics.jsonl").exists():
        print(f"error: {options.run_dir}: no run in this folder (metrics.jsonl is missing)", file=sys.stderr)
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(learning_curve(options.run_dir), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

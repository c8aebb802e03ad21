"""The user's screen and the log files: libraries write to the files, the run itself writes to both."""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

logger = logging.getLogger("megatron_a3po")


def redirect_output(log_file: Path) -> TextIO:
    """Send everything that this process writes to stdout and stderr, also from C++, to `log_file`.

    Returns the former stdout: the user's screen.
    """
    screen = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8", errors="replace")
    sys.stdout.flush()
    sys.stderr.flush()
    with log_file.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return screen


def configure_logging(screen: TextIO | None) -> None:
    """Send the project's messages to the log file (stderr), with time and level, and to the screen as they are."""
    to_file = logging.StreamHandler(sys.stderr)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(to_file)
    if screen is not None:
        logger.addHandler(logging.StreamHandler(screen))
    logger.setLevel(logging.INFO)
    logger.propagate = False


def screen() -> TextIO | None:
    """Return the screen that shows the project's messages; None before `configure_logging`, or without a screen."""
    streams = [handler.stream for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]
    return next((stream for stream in streams if stream is not sys.stderr), None)


def progress_line(step: int, num_steps: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> str:
    """Describe one step in one line for the screen."""
    phases = " ".join(f"{name} {value:.2f}" for name, value in seconds.items() if "/" not in name)
    accuracy = metrics.get("eval_accuracy")
    healthy, lost = metrics.get("servers_healthy", 0.0), metrics.get("servers_quarantined", 0.0)
    servers = f" | servers {healthy:.0f} of {healthy + lost:.0f}" if lost else ""
    return (
        f"step {step:>{len(str(num_steps))}}/{num_steps} | version {metrics['weight_version']:.0f}"
        f" | reward {metrics['reward_mean']:.3f}"
        f" | held-out {'    -' if accuracy is None else f'{accuracy:.3f}'}"
        f" | staleness {metrics['staleness_mean']:.2f} (max {metrics['staleness_max']:.0f})"
        f" | clipped {metrics['clipped_share']:.1%}"
        f" | {metrics['tokens_per_second']:,.0f} tokens/s{servers}"
        f" | seconds: {phases}"
    )

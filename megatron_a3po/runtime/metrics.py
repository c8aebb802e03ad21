"""Write one JSON line and one set of TensorBoard scalars per step."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from megatron_a3po.algorithm.advantage import Advantages
from megatron_a3po.types import FinishReason, Trajectory

_MAX_REASONS = 20
"""A reward function with a new reason for every response must not make as many metrics."""


def batch_metrics(batch: Sequence[Trajectory], advantages: Advantages, version: int) -> dict[str, float]:
    """Return the metrics of a batch that is trained at weight version `version`, without losses. On rank 0."""
    rewards = torch.tensor([trajectory.reward for trajectory in batch])
    lengths = torch.tensor([trajectory.response_length for trajectory in batch], dtype=torch.float32)
    versions = torch.cat([trajectory.weight_versions for trajectory in batch])
    ages = version - versions
    staleness, counts = torch.unique(ages, return_counts=True)
    reasons = Counter(trajectory.reward_reason for trajectory in batch if trajectory.reward_reason)
    mixed = [trajectory.weight_versions.unique().numel() > 1 for trajectory in batch]
    return {
        "weight_version": version + 1,
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "staleness_mean": float(ages.double().mean()),
        "staleness_max": int(ages.max()),
        "num_groups": advantages.num_groups,
        "zero_variance_groups": advantages.num_zero_variance_groups,
        "zero_advantage_share": float((advantages.values == 0).double().mean()),
        "response_length_mean": float(lengths.mean()),
        "length_limit_share": sum(item.finish_reason is FinishReason.LENGTH for item in batch) / len(batch),
        "mixed_version_share": sum(mixed) / len(batch),
        **{f"reward_reason/{reason}": count / len(batch) for reason, count in reasons.most_common(_MAX_REASONS)},
        **{
            f"staleness_share/{age}": count / len(versions)
            for age, count in zip(staleness.tolist(), counts.tolist(), strict=True)
        },
    }


class MetricsWriter:
    """Writes `metrics.jsonl` and `tensorboard/` in the run's folder; both are complete after every step."""

    def __init__(self, run_dir: Path, first_step: int = 0) -> None:
        """Have TensorBoard drop steps from `first_step` on, which an earlier process has written."""
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one step. Values that are not finite become null."""
        # JSON has no NaN; null says "not defined here" in every reader.
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._tensorboard.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`, without a last line torn by a kill; none without a file."""
    path = run_dir / "metrics.jsonl"
    return list(_rows(path)) if path.exists() else []


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        try:
            yield json.loads(line)
        except ValueError:
            if number != len(lines) - 1:
                raise

"""Compare bytes and time of deltas (`publish.delta_folder`) with those of whole versions, by the share that changes.

    python tools/benchmark_delta.py [--mebibytes 64] [--versions 40] [--repeats 5] [--folder FOLDER]

The elements of one bucket of bf16 weights change at random places. Every repeat measures all densities and whole files
in turn. All results are ratios; times are medians over the repeats:

written             bytes of the delta of one version, over those of the whole bucket
with whole files    the same over many versions in a row, including the whole files that are written in between
write               time at the owner (compare, checksum, write), over that of writing the whole bucket
apply               time on the rollout machine (apply, checksum), over that of copying the whole file
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.weights.transports.delta.folder import MODEL, Published, make_local_folder
from megatron_a3po.weights.transports.delta.writer import OwnedShard

DENSITIES = (0.0, 0.01, 0.05, 0.2, 0.5, 1.0)


class Bucket:
    """Published through `folder`, and followed there."""

    def __init__(self, folder: Path, weights: Tensor) -> None:
        self._folder = folder
        (folder / "start" / MODEL).mkdir(parents=True)
        spec = TensorSpec(name="w", dtype=torch.bfloat16, shape=(weights.numel(),))
        self._owned = OwnedShard("model.safetensors", [spec])
        self._weights = weights.clone()
        self._version = 0
        self.publish(0.0)

    def publish(self, density: float) -> tuple[int, float, float]:
        """(bytes written, seconds to write, seconds to apply)"""
        where = (torch.rand(self._weights.shape) < density).nonzero()[:, 0]
        self._weights.view(torch.int16)[where] += 1
        self._version += 1
        written, write_seconds = timed(
            lambda: self._owned.write(self._folder / "start", self._weights.view(torch.uint8))
        )
        published = Published(version=self._version, start="start", shards=(written.shard,))
        _, apply_seconds = timed(lambda: make_local_folder(self._folder, self._folder / "local", published))
        for path in (self._folder / "start").glob("*.safetensors"):
            if path.name not in written.shard.files:
                path.unlink()
        return written.nbytes, write_seconds, apply_seconds


def timed[T](work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"mebibytes": 64, "versions": 40, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="folder to write to; default: the folder for temporary files")
    options = parser.parse_args()
    weights = torch.randn(options.mebibytes << 19).bfloat16()
    figures: dict[float, list[tuple[float, ...]]] = {density: [] for density in DENSITIES}
    with tempfile.TemporaryDirectory(prefix="delta-", dir=options.folder) as folder:
        for repeat in range(options.repeats):
            whole = Bucket(Path(folder) / f"whole{repeat}", weights).publish(1.0)
            for density in DENSITIES:
                bucket = Bucket(Path(folder) / f"{repeat}-{density}", weights)
                found = bucket.publish(density)
                figures[density].append(tuple(one / other for one, other in zip(found, whole, strict=True)))
        print(f"{'density':>8} {'written':>8} {'with whole files':>17} {'write':>6} {'apply':>6}")
        for density in DENSITIES:
            bucket = Bucket(Path(folder) / f"row-{density}", weights)
            row = sum(bucket.publish(density)[0] for _ in range(options.versions)) / options.versions / whole[0]
            written, write, apply = map(statistics.median, zip(*figures[density], strict=True))
            print(f"{density:8.2f} {written:8.4f} {row:17.4f} {write:6.2f} {apply:6.2f}")


if __name__ == "__main__":
    main()

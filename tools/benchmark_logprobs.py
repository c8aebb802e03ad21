"""Measure memory and time of log-probs and entropy with gradients: from logits, fused, and by the naive formula.

    python tools/benchmark_logprobs.py [--repeats 5] [--output FILE.json] [--threads 1]

All variants run in turn in one process, on a GPU if there is one. Peak memory counts all live tensor storages beyond
the inputs (by a dispatch mode; on CUDA by the allocator). Times are medians, given as ratios to the naive formula,
because absolute times of a CPU mean nothing.
"""

import argparse
import json
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_a3po.parallel.vocab_parallel import linear_logprobs_and_entropy, logprobs_and_entropy

NOISE_LIMIT = 0.15
Variant = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(hidden or logits, weight, labels) -> log-probs, entropy"""


class PeakMemory(TorchDispatchMode):
    """Bytes of all tensor storages made inside the block and still alive, at their highest."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), inputs)
        return result

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        identity = storage._cdata
        if identity in self._known or identity in inputs:
            return
        self._known.add(identity)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, identity, storage.nbytes())

    def _free(self, identity: int, num_bytes: int) -> None:
        self._known.discard(identity)
        self.live_bytes -= num_bytes


def naive(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The formula in float32 as one writes it, the entropy used as a value."""
    log_p = logits.float().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], entropy.detach()


FROM_LOGITS: dict[str, Variant] = {
    "naive": lambda logits, _weight, labels: naive(logits, labels),
    "from logits": lambda logits, _weight, labels: logprobs_and_entropy(logits, labels, None),
}
FROM_HIDDEN: dict[str, Variant] = {
    "naive": lambda hidden, weight, labels: naive(hidden @ weight.T, labels),
    "from logits": lambda hidden, weight, labels: logprobs_and_entropy(hidden @ weight.T, labels, None),
    "fused": lambda hidden, weight, labels: linear_logprobs_and_entropy(hidden, weight, labels, None),
}


def step(variant: Variant, inputs: list[Tensor], labels: Tensor) -> None:
    logprobs, _entropy = variant(inputs[0], inputs[-1], labels)
    torch.autograd.grad(logprobs, inputs, torch.ones_like(logprobs))


def peak_bytes(variant: Variant, inputs: list[Tensor], labels: Tensor) -> int:
    if inputs[0].is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(variant, inputs, labels)
        return torch.cuda.max_memory_allocated() - before
    with PeakMemory() as memory:
        step(variant, inputs, labels)
    return memory.peak_bytes


def measure(variants: dict[str, Variant], inputs: list[Tensor], labels: Tensor, repeats: int) -> dict[str, Any]:
    """Per variant: peak bytes, median seconds, their spread, and ratios to the naive formula."""
    peaks = {name: peak_bytes(variant, inputs, labels) for name, variant in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, variant in variants.items():
            start = time.perf_counter()
            step(variant, inputs, labels)
            if inputs[0].is_cuda:
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        name: {
            "peak_mib": peaks[name] / 2**20,
            "peak_over_naive": peaks[name] / peaks["naive"],
            "seconds": medians[name],
            "time_over_naive": statistics.median(
                ours / theirs for ours, theirs in zip(seconds[name], seconds["naive"], strict=True)
            ),
            "spread": (max(seconds[name]) - min(seconds[name])) / medians[name],
        }
        for name in variants
    }


def problem(tokens: int, columns: int, hidden_size: int | None, device: str) -> tuple[list[Tensor], Tensor]:
    """Logits alone, or hidden states and weight; and labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, columns, (tokens,), generator=generator).to(device)
    shapes = [(tokens, columns)] if hidden_size is None else [(tokens, hidden_size), (columns, hidden_size)]
    scale = 1.0 if hidden_size is None else hidden_size**-0.25
    inputs = [(scale * torch.randn(shape, generator=generator)).to(device).requires_grad_() for shape in shapes]
    return inputs, labels


def growth(hidden_size: int, columns: int, device: str) -> float:
    """Peak of the fused function, inputs' gradients aside, at 2,048 tokens over that at 1,024."""
    peaks = []
    for tokens in (1024, 2048):
        inputs, labels = problem(tokens, columns, hidden_size, device)
        gradients = sum(tensor.nbytes for tensor in inputs)
        peaks.append(peak_bytes(FROM_HIDDEN["fused"], inputs, labels) - gradients)
    return peaks[1] / peaks[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    results = {
        "logits, 2,048 tokens, vocabulary 18,992": measure(
            FROM_LOGITS, *problem(2048, 18992, None, device), arguments.repeats
        ),
        "output layer, 1,024 tokens, hidden 512, vocabulary 151,936": measure(
            FROM_HIDDEN, *problem(1024, 151936, 512, device), arguments.repeats
        ),
    }
    print(f"{'':32}{'peak MiB':>10}{'/ naive':>9}{'time / naive':>14}{'spread':>9}")
    noisy = False
    for title, variants in results.items():
        print(title)
        for name, row in variants.items():
            noisy |= row["spread"] > NOISE_LIMIT
            figures = f"{row['peak_mib']:10.0f}{row['peak_over_naive']:9.2f}{row['time_over_naive']:14.2f}"
            print(f"  {name:30}{figures}{row['spread']:9.0%}")
    factor = growth(512, 18992, device)
    print(f"fused, twice the tokens: peak beside the gradients x {factor:.2f}")
    if noisy:
        print(f"noisy: some variant's times spread by more than {NOISE_LIMIT:.0%}; repeat on a quiet machine")
    if arguments.output:
        arguments.output.write_text(json.dumps({**results, "fused_growth": factor}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

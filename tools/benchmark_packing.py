"""Compare ways of packing sequences into microbatches by how evenly they load the data-parallel ranks.

    python tools/benchmark_packing.py [--samples 512] [--ranks 8] [--cap 16384] [--sigma 1.0] [--seeds 20] [--json FILE]

Lengths are lognormal and clipped to the cap; the forward FLOPs of Qwen3-8B stand for time. Per batch:
imbalance   FLOPs of the busiest rank, over the mean
lockstep    time if every microbatch waits for that of the slowest rank: the sum over positions of the most expensive
            microbatch, over the FLOPs of the mean rank
fill        tokens, over microbatches x cap
of best     fewest possible microbatches (a multiple of the ranks), over the number used
over        microbatches larger than the cap
plan ms     milliseconds to find the assignment, FLOPs model included
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_a3po.batching.balance import assign_microbatches, largest_differencing
from megatron_a3po.preflight.architecture import Architecture

type Assignment = list[list[list[int]]]
"""[rank][microbatch][sequence]"""

FIGURES = ("imbalance", "lockstep", "fill", "of best", "over", "plan ms")
HIGHER_IS_BETTER = ("fill", "of best")
QWEN3_8B = Architecture(
    name="Qwen3ForCausalLM",
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_positions=40960,
    tied_embeddings=False,
    input_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=True,
    attention_sinks=False,
    latent=None,
    experts=None,
    moe_layers=(False,) * 36,
    windows=(None,) * 36,
    mtp_layers=0,
)


def deal(microbatches: list[list[int]], ranks: int) -> Assignment:
    """In turn to the ranks, with empty ones at the end until all have the same number."""
    padded = microbatches + [[] for _ in range(-len(microbatches) % ranks)]
    return [padded[rank::ranks] for rank in range(ranks)]


def in_order(lengths: Sequence[int], cap: int, ranks: int) -> Assignment:
    """A new microbatch whenever the next sequence does not fit the present one."""
    microbatches: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room:
            microbatches.append([])
            room = cap
        microbatches[-1].append(index)
        room -= length
    return deal(microbatches, ranks)


def padded(lengths: Sequence[int], cap: int, ranks: int) -> Assignment:
    """As if each sequence were as long as the longest; `figures` counts it so."""
    return in_order([max(lengths)] * len(lengths), cap, ranks)


def random_first_fit(lengths: Sequence[int], cap: int, ranks: int) -> Assignment:
    order = list(range(len(lengths)))
    random.Random(0).shuffle(order)
    microbatches: list[list[int]] = []
    rooms: list[int] = []
    for index in order:
        place = next((place for place, room in enumerate(rooms) if room >= lengths[index]), len(rooms))
        if place == len(rooms):
            microbatches.append([])
            rooms.append(cap)
        microbatches[place].append(index)
        rooms[place] -= lengths[index]
    return deal(microbatches, ranks)


def into_the_emptiest(lengths: Sequence[int], cap: int, ranks: int) -> Assignment:
    """Longest first, each into the microbatch with the fewest tokens; the smallest number that respects the cap."""
    count = fewest(lengths, cap, ranks)
    while True:
        microbatches: list[list[int]] = [[] for _ in range(count)]
        tokens = [0] * count
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            place = tokens.index(min(tokens))
            microbatches[place].append(index)
            tokens[place] += lengths[index]
        if max(tokens) <= cap:
            return deal(microbatches, ranks)
        count += ranks


def differencing_alone(lengths: Sequence[int], cap: int, ranks: int) -> Assignment:
    """Karmarkar-Karp on FLOPs, which knows no cap, into the fewest microbatches."""
    sequences = [[(QWEN3_8B.forward_flops(length), [index])] for index, length in enumerate(lengths)]
    parts = largest_differencing(sequences, fewest(lengths, cap, ranks))
    return deal([members for _, members in parts], ranks)


def balanced(lengths: Sequence[int], cap: int, ranks: int) -> Assignment:
    costs = [QWEN3_8B.forward_flops(length) for length in lengths]
    return assign_microbatches(lengths, costs, max_tokens=cap, num_ranks=ranks)


METHODS: dict[str, Callable[[Sequence[int], int, int], Assignment]] = {
    "padded": padded,
    "random first fit": random_first_fit,
    "in order": in_order,
    "into the emptiest": into_the_emptiest,
    "differencing alone": differencing_alone,
    "batching/balance.py": balanced,
}


def fewest(lengths: Sequence[int], cap: int, ranks: int) -> int:
    return -(-sum(lengths) // (cap * ranks)) * ranks


def figures(name: str, lengths: Sequence[int], cap: int, ranks: int) -> dict[str, float]:
    start = time.perf_counter()
    assignment = METHODS[name](lengths, cap, ranks)
    seconds = time.perf_counter() - start
    processed = [max(lengths)] * len(lengths) if name == "padded" else lengths
    costs = [
        [sum(QWEN3_8B.forward_flops(processed[index]) for index in microbatch) for microbatch in rank]
        for rank in assignment
    ]
    perfect = sum(QWEN3_8B.forward_flops(length) for length in lengths) / ranks
    count = sum(len(rank) for rank in assignment)
    tokens = [sum(processed[index] for index in microbatch) for rank in assignment for microbatch in rank]
    return {
        "imbalance": max(sum(rank) for rank in costs) / statistics.mean(sum(rank) for rank in costs),
        "lockstep": sum(max(position) for position in zip(*costs, strict=True)) / perfect,
        "fill": sum(lengths) / (count * cap),
        "of best": fewest(lengths, cap, ranks) / count,
        "over": sum(number > cap for number in tokens),
        "plan ms": 1000 * seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--cap", type=int, default=16384, help="tokens in a microbatch")
    parser.add_argument("--median", type=float, default=2048, help="tokens of the median sequence")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the logarithm of the lengths")
    parser.add_argument("--seeds", type=int, default=20, help="number of batches")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()

    results: dict[str, dict[str, list[float]]] = {name: {figure: [] for figure in FIGURES} for name in METHODS}
    for seed in range(arguments.seeds):
        source = random.Random(seed)
        drawn = [source.lognormvariate(math.log(arguments.median), arguments.sigma) for _ in range(arguments.samples)]
        lengths = [min(max(round(length), 1), arguments.cap) for length in drawn]
        for name in METHODS:
            for figure, value in figures(name, lengths, arguments.cap, arguments.ranks).items():
                results[name][figure].append(value)

    print(f"median and, in brackets, worst of {arguments.seeds} batches of {arguments.samples} sequences")
    print(" " * 20 + "".join(f"{figure:>18}" for figure in FIGURES))
    for name, row in results.items():
        cells = []
        for figure, values in row.items():
            worst = min(values) if figure in HIGHER_IS_BETTER else max(values)
            digits = {"over": 0, "plan ms": 1}.get(figure, 3)
            cells.append(f"{statistics.median(values):.{digits}f} ({worst:.{digits}f})")
        print(f"{name:20}" + "".join(f"{cell:>18}" for cell in cells))
    if arguments.json:
        options = {key: value for key, value in vars(arguments).items() if key != "json"}
        arguments.json.write_text(json.dumps({"options": options, "results": results}, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

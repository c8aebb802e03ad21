"""Assign sequences to the microbatches of the data-parallel ranks.

There are three aims, in this order: few microbatches, each within a cap of tokens; the same number of them on every
rank, with nearly equal FLOPs per rank; and nearly equal FLOPs of the k-th microbatches of all ranks, because under
pipeline and expert parallelism the ranks run in lockstep and wait for the slowest one at every position k.

1. First-fit-decreasing decides their number, at most 11/9 of the optimum plus 2/3 (Dósa 2007), rounded up.
2. A sequence that costs more than the average microbatch cannot be balanced away. The costliest sequences share
   positions, each filled up to the cost of the first, so that the other ranks have as much to do while one runs.
3. The remaining sequences are divided by Karmarkar and Karp's largest differencing ("The differencing method of set
   partitioning", report UCB/CSD 82/113, 1982): each sequence is a partition with empty other parts; combine the two
   partitions with the largest spread, the costliest part of one with the cheapest of the other, until one is left.
4. That method knows only costs. Moves and swaps between two microbatches bring those over the cap under it. If they
   get stuck, which happens only with a very tight cap, first-fit-decreasing's own microbatches are taken.
5. Microbatches sorted by cost and cut into one per rank give the positions. Dealing each position to the ranks is
   differencing again: it starts from the positions as partitions, so each rank gets one microbatch of each (balanced
   largest differencing, Michiels et al., STACS 2003).

Everything is deterministic: every rank computes the same assignment by itself.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Literal

from megatron_a3po.errors import DataError

type Partition = list[tuple[float, list[int]]]
"""Its parts as (cost, members), the costliest first, without empty parts"""


@dataclass(frozen=True, slots=True)
class _Sequences:
    lengths: Sequence[int]
    costs: Sequence[float]
    max_tokens: int


@dataclass(slots=True)
class _Bin:
    """A microbatch under construction."""

    members: list[int]
    tokens: int
    cost: float

    def add(self, index: int, sequences: _Sequences) -> None:
        self.members.append(index)
        self.tokens += sequences.lengths[index]
        self.cost += sequences.costs[index]

    def remove(self, index: int, sequences: _Sequences) -> None:
        self.members.remove(index)
        self.tokens -= sequences.lengths[index]
        self.cost -= sequences.costs[index]


def assign_microbatches(
    lengths: Sequence[int],
    costs: Sequence[float],
    *,
    max_tokens: int,
    num_ranks: int,
    multiple_of: int = 1,
    oversized: Literal["error", "alone"] = "error",
) -> list[list[list[int]]]:
    """Return the indices of sequences as [rank][microbatch][sequence], balanced by `costs` (FLOPs of each sequence).

    Every rank gets the same number of microbatches, a multiple of `multiple_of`, each with at most `max_tokens` of
    `lengths`. If there are fewer sequences than microbatches, some are empty. A longer sequence gets a microbatch to
    itself (`oversized="alone"`) or raises DataError.
    """
    if oversized == "error" and max(lengths) > max_tokens:
        raise DataError(
            f"a sequence of {max(lengths)} tokens does not fit a microbatch of {max_tokens}; raise "
            "actor.microbatch_tokens (times parallel.context) to the longest prompt plus rollout.max_new_tokens, lower "
            "rollout.max_new_tokens, or set actor.oversized = alone to give such a sequence a microbatch to itself"
        )
    # A sequence that is too long counts as a full microbatch, so nothing joins it.
    sequences = _Sequences([min(length, max_tokens) for length in lengths], costs, max_tokens)
    first_fit = _first_fit_decreasing(sequences)
    step = num_ranks * multiple_of
    count = -(-len(first_fit) // step) * step
    microbatches = _repaired(_balanced(sequences, count, num_ranks), sequences)
    if microbatches is None:
        microbatches = first_fit + [[] for _ in range(count - len(first_fit))]
    return _deal(microbatches, costs, num_ranks)


def _first_fit_decreasing(sequences: _Sequences) -> list[list[int]]:
    """Put each sequence, longest first, into the first microbatch with room."""
    microbatches: list[list[int]] = []
    rooms: list[int] = []
    lengths = sequences.lengths
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = next((place for place, room in enumerate(rooms) if room >= lengths[index]), None)
        if place is None:
            place = len(rooms)
            microbatches.append([])
            rooms.append(sequences.max_tokens)
        microbatches[place].append(index)
        rooms[place] -= lengths[index]
    return microbatches


def _balanced(sequences: _Sequences, count: int, num_ranks: int) -> list[list[int]]:
    """Return `count` microbatches of nearly equal cost, except for the costliest sequences; some exceed the cap."""
    costs = sequences.costs
    rest = sorted(range(len(costs)), key=lambda index: -costs[index])
    microbatches: list[list[int]] = []
    while min(count, len(rest)) > num_ranks and costs[rest[0]] * count > sum(costs[index] for index in rest):
        # Filling up must leave a sequence for each of the other microbatches.
        heavy, rest = _heavy_position(rest, sequences, num_ranks, spare=len(rest) - count)
        microbatches += heavy
        count -= num_ranks
    parts = largest_differencing([[(costs[index], [index])] for index in rest], count)
    return microbatches + [members for _, members in parts] + [[] for _ in range(count - len(parts))]


def _heavy_position(
    costliest_first: list[int], sequences: _Sequences, num_ranks: int, *, spare: int
) -> tuple[list[list[int]], list[int]]:
    """Return one microbatch per rank for the costliest sequences, filled up to the cost of the first, and the rest.

    At most `spare` sequences fill them up.
    """
    lengths, costs = sequences.lengths, sequences.costs
    bins = [_Bin([index], lengths[index], costs[index]) for index in costliest_first[:num_ranks]]
    max_cost = bins[0].cost
    left_over = []
    for index in costliest_first[num_ranks:]:
        for target in bins if spare > 0 else []:
            if target.tokens + lengths[index] <= sequences.max_tokens and target.cost + costs[index] <= max_cost:
                target.add(index, sequences)
                spare -= 1
                break
        else:
            left_over.append(index)
    return [target.members for target in bins], left_over


def largest_differencing(partitions: Sequence[Partition], ways: int) -> Partition:
    """Combine partitions into one of at most `ways` parts of nearly equal cost (Karmarkar and Karp 1982)."""

    def entry(number: int, partition: Partition) -> tuple[float, int, Partition]:
        cheapest = partition[-1][0] if len(partition) == ways else 0.0
        return cheapest - partition[0][0], number, partition  # the number breaks ties

    heap = [entry(number, partition) for number, partition in enumerate(partitions)]
    heapq.heapify(heap)
    for number in range(len(heap), 2 * len(heap) - 1):
        _, _, first = heapq.heappop(heap)
        _, _, second = heap[0]
        heapq.heapreplace(heap, entry(number, _combine(first, second, ways)))
    return heap[0][2]


def _combine(first: Partition, second: Partition, ways: int) -> Partition:
    """Join the costliest part of one with the cheapest of the other, where empty parts are the cheapest."""
    alone_in_first, alone_in_second = ways - len(second), ways - len(first)
    joined = [
        (one_cost + other_cost, one + other)
        for (one_cost, one), (other_cost, other) in zip(
            first[alone_in_first:], reversed(second[alone_in_second:]), strict=True
        )
    ]
    parts = first[:alone_in_first] + joined + second[:alone_in_second]
    parts.sort(key=itemgetter(0), reverse=True)
    return parts


def _repaired(microbatches: list[list[int]], sequences: _Sequences) -> list[list[int]] | None:
    """Bring every microbatch within the cap; return None if no single move or swap helps any more."""
    lengths, costs = sequences.lengths, sequences.costs
    bins = [
        _Bin(list(members), sum(lengths[index] for index in members), sum(costs[index] for index in members))
        for members in microbatches
    ]
    while True:
        *others, fullest = sorted(bins, key=attrgetter("tokens"))
        if fullest.tokens <= sequences.max_tokens:
            return [microbatch.members for microbatch in bins]
        if not any(_relieve(fullest, other, sequences) for other in others):
            return None


def _relieve(full: _Bin, other: _Bin, sequences: _Sequences) -> bool:
    """Make the move or swap that leaves the fewest tokens over the cap, and of several the one with the best costs.

    Return False and change nothing if none leaves fewer tokens over the cap than before.
    """
    lengths, costs, cap = sequences.lengths, sequences.costs, sequences.max_tokens
    best = (max(full.tokens - cap, 0) + max(other.tokens - cap, 0), 0.0)
    choice: tuple[int, int | None] | None = None
    for given in full.members:
        for taken in (None, *other.members):
            tokens = lengths[given] - (0 if taken is None else lengths[taken])
            cost = costs[given] - (0.0 if taken is None else costs[taken])
            over = max(full.tokens - tokens - cap, 0) + max(other.tokens + tokens - cap, 0)
            score = (over, max(full.cost - cost, other.cost + cost))
            if score < best:
                best, choice = score, (given, taken)
    if choice is None:
        return False
    given, taken = choice
    full.remove(given, sequences)
    other.add(given, sequences)
    if taken is not None:
        other.remove(taken, sequences)
        full.add(taken, sequences)
    return True


def _deal(microbatches: list[list[int]], costs: Sequence[float], num_ranks: int) -> list[list[list[int]]]:
    """Return [rank][microbatch][sequence]: positions have microbatches of similar cost, and ranks similar totals."""
    parts = [(sum(costs[index] for index in members), members) for members in microbatches]
    parts.sort(key=lambda part: (-part[0], not part[1]))
    positions = [
        [(parts[number][0], [number]) for number in range(start, start + num_ranks)]
        for start in range(0, len(parts), num_ranks)
    ]
    ranks = largest_differencing(positions, num_ranks)
    return [[parts[number][1] for number in sorted(numbers)] for _, numbers in ranks]

"""Assigning sequences to microbatches: each once, within the cap, few, and balanced between ranks and in lockstep."""

import itertools
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_a3po.batching.balance import Partition, assign_microbatches, largest_differencing
from megatron_a3po.errors import DataError

seeded = settings(max_examples=150, deadline=None, derandomize=True)
CAP = 16384


def flops(lengths: list[int]) -> list[float]:
    return [24576.0 * length + length * length for length in lengths]


def tokens(lengths: list[int], assignment: list[list[list[int]]]) -> list[list[int]]:
    return [[sum(lengths[index] for index in microbatch) for microbatch in rank] for rank in assignment]


def imbalance_and_lockstep(lengths: list[int], assignment: list[list[list[int]]]) -> tuple[float, float]:
    """FLOPs of the busiest rank, and of the costliest microbatch at each position together, over the mean rank's."""
    costs = flops(lengths)
    totals = [[sum(costs[index] for index in microbatch) for microbatch in rank] for rank in assignment]
    perfect = sum(costs) / len(assignment)
    lockstep = sum(max(position) for position in zip(*totals, strict=True))
    return max(sum(rank) for rank in totals) / perfect, lockstep / perfect


def lognormal_lengths(seed: int, number: int, median: int) -> list[int]:
    source = random.Random(seed)
    return [min(max(int(median * source.lognormvariate(0, 1)), 1), CAP) for _ in range(number)]


def fewest_bins(lengths: list[int], cap: int) -> int:
    """By trying everything."""

    def fits(remaining: list[int], rooms: tuple[int, ...]) -> bool:
        if not remaining:
            return True
        first, rest = remaining[0], remaining[1:]
        return any(
            fits(rest, (*rooms[:place], room - first, *rooms[place + 1 :]))
            for place, room in enumerate(rooms)
            if room >= first and room not in rooms[:place]
        )

    longest_first = sorted(lengths, reverse=True)
    return next(count for count in itertools.count(1) if fits(longest_first, (cap,) * count))


@seeded
@given(st.data())
def test_every_sequence_is_in_one_microbatch_within_the_cap_and_ranks_have_the_same_number(data: st.DataObject) -> None:
    num_ranks, multiple_of = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    max_tokens = data.draw(st.integers(20, 60))
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=num_ranks, max_size=70))
    costs = data.draw(st.lists(st.floats(1, 1e6), min_size=len(lengths), max_size=len(lengths)))

    ranks = assign_microbatches(
        lengths, costs, max_tokens=max_tokens, num_ranks=num_ranks, multiple_of=multiple_of, oversized="alone"
    )
    microbatches = [microbatch for rank in ranks for microbatch in rank]

    assert sorted(index for microbatch in microbatches for index in microbatch) == list(range(len(lengths)))
    for microbatch in microbatches:
        assert sum(lengths[index] for index in microbatch) <= max_tokens or len(microbatch) == 1
    assert len(ranks) == num_ranks and {len(rank) for rank in ranks} == {len(ranks[0])}
    assert len(ranks[0]) % multiple_of == 0
    num_empty = sum(not microbatch for microbatch in microbatches)
    assert num_empty == max(len(microbatches) - len(lengths), 0)
    for rank in ranks:
        assert all(rank[: sum(map(bool, rank))]), "empty microbatches come last"
    assert ranks == assign_microbatches(
        lengths, costs, max_tokens=max_tokens, num_ranks=num_ranks, multiple_of=multiple_of, oversized="alone"
    )


@seeded
@given(st.lists(st.integers(1, 12), min_size=3, max_size=9), st.integers(12, 20), st.integers(1, 3))
def test_the_number_of_microbatches_is_within_the_bound_of_first_fit_decreasing(
    lengths: list[int], max_tokens: int, num_ranks: int
) -> None:
    ranks = assign_microbatches(lengths, flops(lengths), max_tokens=max_tokens, num_ranks=num_ranks)

    most = (11 * fewest_bins(lengths, max_tokens) + 6) // 9
    assert len(ranks[0]) <= -(-most // num_ranks)


@pytest.mark.parametrize("median", [512, 2048, 4096])
def test_lognormal_batches_take_no_more_microbatches_than_their_tokens_demand(median: int) -> None:
    for seed in range(5):
        lengths = lognormal_lengths(seed, 512, median)
        ranks = assign_microbatches(lengths, flops(lengths), max_tokens=CAP, num_ranks=8)

        assert len(ranks[0]) == -(-sum(lengths) // (8 * CAP))


def test_lognormal_batches_are_balanced_between_ranks_and_in_lockstep() -> None:
    figures = []
    for seed in range(20):
        lengths = lognormal_lengths(seed, 512, 2048)
        ranks = assign_microbatches(lengths, flops(lengths), max_tokens=CAP, num_ranks=8)
        figures.append(imbalance_and_lockstep(lengths, ranks))
    imbalances, locksteps = zip(*figures, strict=True)

    assert max(imbalances) <= 1.02
    assert max(locksteps) <= 1.02 and statistics.median(locksteps) <= 1.012


def test_sequences_costlier_than_the_average_microbatch_run_side_by_side() -> None:
    # Were the four long ones at different positions, each would hold up three ranks.
    lengths = [16384, 16000, 15500, 15000] + [1024] * 96
    ranks = assign_microbatches(lengths, flops(lengths), max_tokens=CAP, num_ranks=4)

    assert sorted(index for rank in ranks for index in rank[0] if index < 4) == [0, 1, 2, 3]
    assert imbalance_and_lockstep(lengths, ranks)[1] <= 1.05


def test_what_runs_beside_a_long_sequence_is_filled_up_to_its_cost_and_it_is_left_alone() -> None:
    lengths = [12000] + [1024] * 24
    ranks = assign_microbatches(lengths, flops(lengths), max_tokens=CAP, num_ranks=2)

    assert sorted(sorted(rank) for rank in tokens(lengths, ranks)) == [[4096, 12000], [4096, 16384]]


def test_differencing_gives_karmarkar_and_karps_parts_of_a_known_set() -> None:
    costs = [8, 7, 6, 5, 4]
    parts = largest_differencing([[(cost, [index])] for index, cost in enumerate(costs)], 2)

    # 8-7 and 6-5 leave 4, 1, 1, hence a difference of 2; the optimum is 8+7 = 6+5+4.
    assert [cost for cost, _ in parts] == [16, 14]
    assert sorted(index for _, members in parts for index in members) == [0, 1, 2, 3, 4]
    assert [cost for cost, members in parts if cost != sum(costs[index] for index in members)] == []


@seeded
@given(st.lists(st.integers(1, 99), min_size=1, max_size=7), st.integers(1, 3))
def test_differencing_stays_within_its_proven_ratio_to_the_best_division(costs: list[int], ways: int) -> None:
    parts = largest_differencing([[(cost, [index])] for index, cost in enumerate(costs)], ways)

    best = min(
        max(sum(cost for cost, place in zip(costs, places, strict=True) if place == way) for way in range(ways))
        for places in itertools.product(range(ways), repeat=len(costs))
    )
    assert len(parts) == min(ways, len(costs))
    assert best <= parts[0][0] <= best * (4 / 3 - 1 / (3 * ways)) + 1e-9
    assert sum(cost for cost, _ in parts) == sum(costs)


def test_differencing_full_partitions_takes_one_part_of_each() -> None:
    partitions: list[Partition] = [[(9, [0]), (5, [1])], [(8, [2]), (5, [3])], [(3, [4]), (2, [5])]]

    # 9+5 and 5+8 differ by 1, as do 3 and 2: 14+2 and 13+3.
    first, second = largest_differencing(partitions, 2)
    assert (first[0], second[0]) == (16, 16)
    assert sorted([sorted(first[1]), sorted(second[1])]) == [[0, 3, 5], [1, 2, 4]]


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "num_ranks", "multiple_of", "expected"),
    [
        pytest.param([100] * 64, 400, 4, 1, [[400] * 4] * 4, id="equal ones are divided evenly"),
        pytest.param(
            [length for short in range(1, 33) for length in (short, 100 - short)],
            100,
            4,
            1,
            [[100] * 8] * 4,
            id="all must be exactly full",
        ),
        # 32 tokens into 33: moves and swaps get stuck, and first-fit-decreasing has the answer.
        pytest.param([1, 3, 4, 4, 6, 5, 9], 11, 1, 1, [[10, 11, 11]], id="moves and swaps get stuck"),
        pytest.param([50] * 5 + [1, 1, 1], 50, 2, 1, [[3, 50, 50], [50, 50, 50]], id="as long as the cap"),
        pytest.param([10, 10, 10], 10, 2, 1, [[0, 10], [10, 10]], id="fewer than microbatches"),
        pytest.param([9, 2], 10, 2, 3, [[0, 0, 2], [0, 0, 9]], id="empty ones up to the multiple"),
        pytest.param([3, 4], 10, 4, 2, [[0, 0], [0, 0], [0, 3], [0, 4]], id="fewer than ranks"),
    ],
)
def test_tight_and_small_batches_are_assigned_as_by_hand(
    lengths: list[int], max_tokens: int, num_ranks: int, multiple_of: int, expected: list[list[int]]
) -> None:
    ranks = assign_microbatches(
        lengths, flops(lengths), max_tokens=max_tokens, num_ranks=num_ranks, multiple_of=multiple_of
    )

    assert sorted(sorted(rank) for rank in tokens(lengths, ranks)) == expected


def test_an_oversized_sequence_alone_has_a_microbatch_to_itself() -> None:
    lengths = [500, 3, 4, 5, 120, 6]
    ranks = assign_microbatches(lengths, flops(lengths), max_tokens=100, num_ranks=2, oversized="alone")

    assert [0] in [rank[0] for rank in ranks] and [4] in [rank[0] for rank in ranks]
    assert [len(rank) for rank in ranks] == [2, 2]


def test_an_oversized_sequence_is_an_error_with_its_remedies() -> None:
    with pytest.raises(DataError, match=r"11 .* 10; .*rollout\.max_new_tokens.*actor\.oversized = alone"):
        assign_microbatches([3, 11], [3.0, 11.0], max_tokens=10, num_ranks=1)

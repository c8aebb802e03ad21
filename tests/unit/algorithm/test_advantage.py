"""Advantages by each method against loops in plain Python, and DAPO's penalty against its three branches."""

import statistics
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_a3po.algorithm.advantage import AdvantageMethod, Advantages, compute_advantages, overlong_penalty

METHODS: list[AdvantageMethod] = ["grpo", "dr_grpo", "rloo", "reinforce_pp"]
seeded = settings(max_examples=40, deadline=None, derandomize=True)
Samples = list[tuple[int, float]]
SAMPLES = st.lists(
    st.tuples(st.integers(-2, 3), st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]) | st.floats(-5, 5, width=32)),
    min_size=1,
    max_size=30,
)


def compute(samples: Samples, method: AdvantageMethod) -> Advantages:
    groups, rewards = zip(*samples, strict=True)
    result = compute_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), method)
    assert result.values.dtype == torch.float32
    return result


def by_a_loop(samples: Samples, method: AdvantageMethod) -> list[float]:
    values = []
    for index, (group, reward) in enumerate(samples):
        others = [other for number, (member, other) in enumerate(samples) if member == group and number != index]
        compared = [other for _, other in samples] if method == "reinforce_pp" else [reward, *others]
        centred = reward - statistics.fmean(compared)
        if len(set(compared)) == 1:
            values.append(0.0)
        elif method == "dr_grpo":
            values.append(centred)
        elif method == "rloo":
            values.append(reward - statistics.fmean(others))
        else:
            values.append(centred / (statistics.stdev(compared) + 1e-4))
    return values


@pytest.mark.parametrize("method", METHODS)
@seeded
@given(SAMPLES)
def test_advantages_equal_a_loop(method: AdvantageMethod, samples: Samples) -> None:
    result = compute(samples, method)

    tolerance = 1e-6 if method in ("dr_grpo", "rloo") else 1e-5
    assert result.values.tolist() == pytest.approx(by_a_loop(samples, method), rel=tolerance, abs=tolerance / 10)
    assert result.num_groups == len({group for group, _ in samples})


@pytest.mark.parametrize("method", METHODS)
@seeded
@given(SAMPLES, st.randoms(use_true_random=False))
def test_the_order_of_the_trajectories_means_nothing(method: AdvantageMethod, samples: Samples, random: Random) -> None:
    order = list(range(len(samples)))
    random.shuffle(order)
    shuffled, straight = compute([samples[index] for index in order], method), compute(samples, method)

    torch.testing.assert_close(shuffled.values, straight.values[order], rtol=1e-6, atol=1e-6)
    assert shuffled.num_zero_variance_groups == straight.num_zero_variance_groups


def test_groups_of_unequal_size_have_their_own_mean_and_unbiased_deviation() -> None:
    result = compute([(900, 1.0), (3, 2.0), (900, 0.0), (3, 4.0), (3, 6.0)], "grpo")

    half, two = 0.5 / (0.5**0.5 + 1e-4), 2 / (2 + 1e-4)
    assert result.values.tolist() == pytest.approx([half, -two, -half, 0.0, two])
    assert (result.num_groups, result.num_zero_variance_groups) == (2, 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1 / 3, 1e30, -0.7])
@pytest.mark.parametrize("size", [1, 3, 6, 7, 10])
def test_equal_rewards_teach_exactly_nothing_by_any_method(method: AdvantageMethod, reward: float, size: int) -> None:
    """Also where the mean of equal rewards is another number in floating point."""
    assert compute([(0, reward)] * size, method).values.tolist() == [0.0] * size


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_a_group_alone_or_of_equal_rewards_is_zero_and_counted_beside_groups_that_are_not(
    method: AdvantageMethod,
) -> None:
    result = compute([(7, 0.1), (9, 0.0), (7, 0.1), (1, 0.3), (9, 1.0), (7, 0.1)], method)

    assert result.values[[0, 2, 3, 5]].tolist() == [0.0] * 4
    assert result.values[1] < 0 < result.values[4]
    assert (result.num_groups, result.num_zero_variance_groups) == (3, 2)


def test_reinforce_pp_does_not_see_the_groups_but_counts_those_that_compare_nothing() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0])
    apart = compute_advantages(rewards, torch.tensor([0, 0, 1, 1]), "reinforce_pp")
    together = compute_advantages(rewards, torch.tensor([4, 4, 4, 4]), "reinforce_pp")

    assert torch.equal(apart.values, together.values)
    assert apart.values[0] > 0 > apart.values[2]
    assert (apart.num_zero_variance_groups, together.num_zero_variance_groups) == (1, 0)


@pytest.mark.parametrize("method", METHODS)
def test_a_lost_member_of_one_group_leaves_the_other_groups_advantages_as_they_are(method: AdvantageMethod) -> None:
    samples = [(0, 1.0), (1, 0.0), (0, 0.0), (1, 1.0), (1, 0.25), (0, 0.5)]
    whole, without = compute(samples, method).values, compute(samples[1:], method).values
    group = torch.tensor([index for index, (number, _) in enumerate(samples) if number == 1])

    assert torch.equal(whole[group], without[group - 1]) is (method != "reinforce_pp")


def test_a_large_offset_common_to_all_rewards_changes_nothing() -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 0.5, 0.25] * 5), torch.zeros(20, dtype=torch.int64)
    expected = compute_advantages(rewards, groups).values

    assert torch.equal(compute_advantages(rewards + 2**20, groups).values, expected)


def test_grpo_is_the_default_and_integer_rewards_count_as_numbers() -> None:
    result = compute_advantages(torch.tensor([0, 1]), torch.tensor([0, 0]))

    assert torch.equal(result.values, compute([(0, 0.0), (0, 1.0)], "grpo").values)


@pytest.mark.parametrize("method", METHODS)
def test_a_reward_that_is_not_a_number_reaches_its_advantage(method: AdvantageMethod) -> None:
    """It fails the step there. As equal rewards, or as a silent zero, it would go unnoticed."""
    result = compute([(0, float("nan")), (0, 1.0), (1, 0.0), (1, 1.0)], method)

    assert bool(result.values[:2].isnan().all())
    assert bool(result.values[2:].isfinite().all()) or method == "reinforce_pp"
    assert result.num_zero_variance_groups == 0


def dapo(length: int, longest: int, cache: int) -> float:
    """arXiv 2503.14476, equation 13, branch by branch."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("longest", "cache"), [(20, 5), (20, 1), (20, 20), (16384, 4096)])
def test_the_penalty_of_long_responses_is_dapos_at_every_corner(longest: int, cache: int) -> None:
    start = longest - cache
    lengths = [0, 1, start - 1, start, start + 1, longest - 1, longest, longest + 1, 10 * longest]
    penalty = overlong_penalty(torch.tensor(lengths), longest, cache)

    assert penalty.dtype == torch.float32
    assert penalty.tolist() == pytest.approx([dapo(length, longest, cache) for length in lengths], rel=1e-6)
    assert penalty[3] == 0.0 and penalty[6] == penalty[8] == -1.0


def test_without_a_buffer_no_length_is_penalised() -> None:
    penalty = overlong_penalty(torch.tensor([0, 19, 20, 1000]), 20, 0)

    assert penalty.tolist() == [0.0] * 4 and penalty.dtype == torch.float32

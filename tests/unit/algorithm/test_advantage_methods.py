"""Dr. GRPO, RLOO and REINFORCE++ against loops in plain Python, and DAPO's penalty against its three branches."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_a3po.algorithm.advantage import AdvantageMethod, compute_advantages, overlong_penalty

METHODS: list[AdvantageMethod] = ["grpo", "dr_grpo", "rloo", "reinforce_pp"]
seeded = settings(max_examples=40, deadline=None, derandomize=True)
Samples = list[tuple[int, float]]
SAMPLES = st.lists(
    st.tuples(st.integers(-2, 3), st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]) | st.floats(-5, 5, width=32)),
    min_size=1,
    max_size=24,
)


def compute(samples: Samples, method: AdvantageMethod) -> list[float]:
    groups, rewards = zip(*samples, strict=True)
    result = compute_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), method)
    assert result.values.dtype == torch.float32
    return result.values.tolist()


def less_the_mean_of_the_group(samples: Samples) -> list[float]:
    return [
        reward - statistics.fmean(other for member, other in samples if member == group) for group, reward in samples
    ]


def less_the_mean_of_the_others(samples: Samples) -> list[float]:
    values = []
    for index, (group, reward) in enumerate(samples):
        others = [other for number, (member, other) in enumerate(samples) if member == group and number != index]
        values.append(reward - statistics.fmean(others) if others else 0.0)
    return values


def normalised_over_the_batch(samples: Samples) -> list[float]:
    rewards = [reward for _, reward in samples]
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]


@seeded
@given(SAMPLES)
def test_dr_grpo_subtracts_the_mean_of_the_group(samples: Samples) -> None:
    assert compute(samples, "dr_grpo") == pytest.approx(less_the_mean_of_the_group(samples), rel=1e-6, abs=1e-7)


@seeded
@given(SAMPLES)
def test_rloo_subtracts_the_mean_of_the_other_members(samples: Samples) -> None:
    assert compute(samples, "rloo") == pytest.approx(less_the_mean_of_the_others(samples), rel=1e-6, abs=1e-7)


@seeded
@given(SAMPLES)
def test_reinforce_pp_normalises_over_the_whole_batch(samples: Samples) -> None:
    assert compute(samples, "reinforce_pp") == pytest.approx(normalised_over_the_batch(samples), rel=1e-5, abs=1e-6)


def test_reinforce_pp_does_not_see_the_groups_but_counts_those_that_compare_nothing() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0])
    apart = compute_advantages(rewards, torch.tensor([0, 0, 1, 1]), "reinforce_pp")
    together = compute_advantages(rewards, torch.tensor([4, 4, 4, 4]), "reinforce_pp")

    assert torch.equal(apart.values, together.values)
    assert apart.values[0] > 0 > apart.values[2]
    assert (apart.num_zero_variance_groups, together.num_zero_variance_groups) == (1, 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e30])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_batch_of_equal_rewards_teaches_exactly_nothing_by_any_method(
    method: AdvantageMethod, reward: float, size: int
) -> None:
    assert compute([(0, reward)] * size, method) == [0.0] * size


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_a_group_alone_or_of_equal_rewards_is_zero_beside_groups_that_are_not(method: AdvantageMethod) -> None:
    values = compute([(7, 0.1), (9, 0.0), (7, 0.1), (1, 0.3), (9, 1.0), (7, 0.1)], method)

    assert [values[index] for index in (0, 2, 3, 5)] == [0.0] * 4
    assert values[1] < 0 < values[4]


@pytest.mark.parametrize("method", METHODS)
def test_a_lost_member_of_one_group_leaves_the_other_groups_advantages_as_they_are(method: AdvantageMethod) -> None:
    samples = [(0, 1.0), (1, 0.0), (0, 0.0), (1, 1.0), (1, 0.25), (0, 0.5)]
    whole, without = compute(samples, method), compute(samples[1:], method)
    group = [index for index, (number, _) in enumerate(samples) if number == 1]

    same = [whole[index] for index in group] == [without[index - 1] for index in group]
    assert same is (method != "reinforce_pp")


@pytest.mark.parametrize("method", METHODS)
def test_a_reward_that_is_not_a_number_reaches_its_advantage(method: AdvantageMethod) -> None:
    """There it fails the step; as a silent zero it would go unnoticed."""
    values = compute([(0, float("nan")), (0, 1.0), (1, 0.0), (1, 1.0)], method)

    assert all(value != value for value in values[:2])


def test_the_default_method_is_grpo() -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 0.25]), torch.tensor([0, 0, 0])

    assert torch.equal(compute_advantages(rewards, groups).values, compute_advantages(rewards, groups, "grpo").values)
    assert not torch.equal(
        compute_advantages(rewards, groups).values, compute_advantages(rewards, groups, "dr_grpo").values
    )


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


def test_the_penalty_falls_in_equal_steps_within_the_buffer() -> None:
    penalty = overlong_penalty(torch.arange(95, 101), 100, 5)

    assert penalty.tolist() == pytest.approx([0.0, -0.2, -0.4, -0.6, -0.8, -1.0])


def test_without_a_buffer_no_length_is_penalised() -> None:
    penalty = overlong_penalty(torch.tensor([0, 19, 20, 1000]), 20, 0)

    assert penalty.tolist() == [0.0] * 4 and penalty.dtype == torch.float32

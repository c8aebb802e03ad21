"""Group-relative advantages against a loop over groups in plain Python."""

import statistics
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_a3po.algorithm.advantage import Advantages, compute_advantages

seeded = settings(max_examples=40, deadline=None, derandomize=True)
REWARDS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]) | st.floats(-5, 5, width=32)),
    min_size=1,
    max_size=30,
)


def compute(samples: list[tuple[int, float]]) -> Advantages:
    groups, rewards = zip(*samples, strict=True)
    return compute_advantages(torch.tensor(rewards), torch.tensor(groups))


def by_a_loop(samples: list[tuple[int, float]]) -> list[float]:
    values = []
    for group, reward in samples:
        rewards = [float(torch.tensor(other)) for member, other in samples if member == group]
        if len(set(rewards)) == 1:
            values.append(0.0)
        else:
            centred = float(torch.tensor(reward)) - statistics.fmean(rewards)
            values.append(centred / (statistics.stdev(rewards) + 1e-4))
    return values


@seeded
@given(REWARDS)
def test_advantages_equal_a_loop_over_groups(samples: list[tuple[int, float]]) -> None:
    result = compute(samples)

    assert result.values.dtype == torch.float32
    assert result.values.tolist() == pytest.approx(by_a_loop(samples), rel=1e-5, abs=1e-6)
    assert result.num_groups == len({group for group, _ in samples})


@seeded
@given(REWARDS, st.randoms(use_true_random=False))
def test_the_order_of_the_trajectories_means_nothing(samples: list[tuple[int, float]], random: Random) -> None:
    order = list(range(len(samples)))
    random.shuffle(order)
    shuffled = compute([samples[index] for index in order])

    torch.testing.assert_close(shuffled.values, compute(samples).values[order], rtol=1e-6, atol=1e-6)
    assert shuffled.num_zero_variance_groups == compute(samples).num_zero_variance_groups


def test_groups_of_unequal_size_have_their_own_mean_and_unbiased_deviation() -> None:
    result = compute([(900, 1.0), (3, 2.0), (900, 0.0), (3, 4.0), (3, 6.0)])

    half, two = 0.5 / (0.5**0.5 + 1e-4), 2 / (2 + 1e-4)
    assert result.values.tolist() == pytest.approx([half, -two, -half, 0.0, two])
    assert (result.num_groups, result.num_zero_variance_groups) == (2, 0)


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1 / 3, 1e30, -0.1])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_a_group_with_equal_rewards_has_advantages_of_exactly_zero_and_is_counted(reward: float, size: int) -> None:
    samples = [(5, reward)] * size + [(6, 0.0), (6, 1.0)]
    result = compute(samples)

    assert result.values[:size].tolist() == [0.0] * size
    assert result.values[-1] > 0
    assert (result.num_groups, result.num_zero_variance_groups) == (2, 1)


@pytest.mark.parametrize("size", [3, 6, 7])
def test_equal_rewards_in_double_precision_whose_mean_is_another_number_still_teach_nothing(size: int) -> None:
    rewards = torch.full((size,), 0.1, dtype=torch.float64)
    mean = torch.zeros((), dtype=torch.float64)
    for reward in rewards:
        mean += reward
    assert mean / size != 0.1

    assert compute_advantages(rewards, torch.zeros(size, dtype=torch.int64)).values.tolist() == [0.0] * size


def test_a_large_offset_common_to_all_rewards_changes_nothing() -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 0.5, 0.25] * 5), torch.zeros(20, dtype=torch.int64)
    expected = compute_advantages(rewards, groups).values

    assert torch.equal(compute_advantages(rewards + 2**20, groups).values, expected)


def test_integer_rewards_count_as_numbers() -> None:
    result = compute_advantages(torch.tensor([0, 1]), torch.tensor([0, 0]))

    assert result.values.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-3)


def test_a_reward_that_is_not_a_number_is_not_taken_for_equal_rewards() -> None:
    """It reaches the gradient norm, which fails the step; as a silent zero it would go unnoticed."""
    result = compute([(0, float("nan")), (0, 1.0), (1, 0.0), (1, 1.0)])

    assert bool(result.values[:2].isnan().all()) and bool(result.values[2:].isfinite().all())
    assert result.num_zero_variance_groups == 0

"""avg@k, pass@k and their intervals, against counting, the defining equation, and simulation."""

import itertools
import math
import random

import pytest

from megatron_a3po.algorithm.accuracy import confidence_interval, pass_at_k


@pytest.mark.parametrize(("num_samples", "k"), [(1, 1), (4, 1), (4, 2), (6, 3), (8, 8), (7, 4)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_response(num_samples: int, k: int) -> None:
    for num_right in range(num_samples + 1):
        right = [index < num_right for index in range(num_samples)]
        draws = [any(draw) for draw in itertools.combinations(right, k)]
        assert pass_at_k(num_right, num_samples, k) == pytest.approx(sum(draws) / len(draws), abs=1e-15)


@pytest.mark.parametrize(("num_right", "num_samples", "k"), [(0, 4, 0), (0, 4, 5), (5, 4, 1), (-1, 4, 1)])
def test_what_is_no_draw_is_refused(num_right: int, num_samples: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {num_right} right among {num_samples}"):
        pass_at_k(num_right, num_samples, k)


@pytest.mark.parametrize("values", [[0.0] * 30, [1.0] * 30, [1.0, 0.0, 0.0], [0.25, 0.5, 1.0, 0.75], [0.5]])
def test_the_bounds_are_the_means_that_are_just_not_rejected(values: list[float]) -> None:
    number, mean = len(values), sum(values) / len(values)
    for bound in confidence_interval(values):
        if abs(bound - mean) > 1e-12:
            assert abs(mean - bound) / math.sqrt(bound * (1 - bound) / number) == pytest.approx(1.959964, rel=1e-6)
        else:
            assert mean in (0.0, 1.0)


def test_the_interval_holds_the_truth_in_95_of_100_evaluations_also_with_several_responses_per_prompt() -> None:
    generator = random.Random(0)
    abilities = [generator.betavariate(0.3, 0.5) for _ in range(20_000)]
    truth, hits, number = sum(abilities) / len(abilities), 0, 2000
    for _ in range(number):
        chosen = generator.sample(abilities, 30)
        values = [sum(generator.random() < ability for _ in range(4)) / 4 for ability in chosen]
        low, high = confidence_interval(values)
        hits += low <= truth <= high
    assert hits / number > 0.95


def test_rewards_outside_0_to_1_have_the_normal_interval() -> None:
    values = [-1.0, 2.0, 0.5, 0.5]
    low, high = confidence_interval(values)
    deviation = math.sqrt(sum((value - 0.5) ** 2 for value in values) / 3)
    assert (low + high) / 2 == pytest.approx(0.5) and (high - low) / 2 == pytest.approx(1.959964 * deviation / 2)
    assert confidence_interval([3.0]) == (-math.inf, math.inf)

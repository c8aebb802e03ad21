"""The interpolated proximal policies: the weight that each schedule gives, and where the policy then lies."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_a3po.algorithm.diagnostics import as_numbers
from megatron_a3po.algorithm.loss import decoupled_ppo_loss
from megatron_a3po.algorithm.proximal import (
    Anchor,
    Schedule,
    behaviour_weight,
    linear_proximal_logprobs,
    proximal_logprobs,
)

LOW, HIGH = 0.2, 0.3
SCHEDULES: list[Schedule] = ["inverse", "inverse_sqrt", 0.0, 0.3, 1.0]
INTERPOLATIONS: list[Callable[..., Tensor]] = [proximal_logprobs, linear_proximal_logprobs]
LOGPROB = st.floats(-50, 0, width=32)
seeded = settings(max_examples=40, deadline=None, derandomize=True)


def slope(log_rho: float, p: Callable[[Tensor, Tensor], Tensor], advantage: float) -> float:
    """Gradient of the loss of one token with pi_behaviour = 1/e and log(pi_target / pi_behaviour) = log_rho."""
    theta = torch.tensor([log_rho - 1.0], dtype=torch.float64, requires_grad=True)
    b, mask = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([True])
    loss = decoupled_ppo_loss(
        theta,
        b,
        p(theta, b),
        torch.tensor([2]),
        torch.tensor([advantage], dtype=torch.float64),
        mask,
        clip_epsilon_low=LOW,
        clip_epsilon_high=HIGH,
    ).loss_sum
    (gradient,) = torch.autograd.grad(loss, theta)
    return gradient.item()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("inverse", [1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 8]),
        ("inverse_sqrt", [1.0, 2**-0.5, 3**-0.5, 0.5, 8**-0.5]),
        (0.0, [0.0] * 5),
        (0.3, [0.3] * 5),
        (1.0, [1.0] * 5),
    ],
)
@pytest.mark.parametrize(("anchor", "fresh"), [("target", 0.0), ("behaviour", 1.0)])
def test_a_schedule_says_how_much_the_behaviour_policy_weighs_at_each_staleness(
    schedule: Schedule, expected: list[float], anchor: Anchor, fresh: float
) -> None:
    weight = behaviour_weight(torch.tensor([1, 2, 3, 4, 8, 0]), schedule, anchor)

    assert weight.dtype == torch.float32
    assert weight.tolist() == pytest.approx([*expected, fresh], rel=1e-6)
    assert weight[-1] == fresh


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_weight_never_leaves_zero_to_one_and_never_rises_with_staleness(schedule: Schedule) -> None:
    stale = behaviour_weight(torch.arange(1, 5000), schedule)

    assert float(stale.min()) >= 0 and float(stale.max()) <= 1
    assert bool((stale.diff() <= 0).all())


@pytest.mark.parametrize("schedule", ["inverse", "inverse_sqrt"])
@pytest.mark.parametrize("interpolate", INTERPOLATIONS)
def test_a_token_of_staleness_one_is_measured_against_the_behaviour_policy_to_the_last_bit(
    schedule: Schedule, interpolate: Callable[..., Tensor]
) -> None:
    b = -torch.rand(67, generator=torch.Generator().manual_seed(0))  # more than the lanes of a vector, and a rest

    p = interpolate(torch.full_like(b, -7.0), b, torch.ones(67, dtype=torch.int64), schedule)

    assert torch.equal(p, b)


@pytest.mark.parametrize("interpolate", INTERPOLATIONS)
@pytest.mark.parametrize("apart", [0.0, 1.0, 30.0, 300.0])
def test_a_weight_of_zero_is_the_target_exactly_and_of_one_the_behaviour_policy(
    interpolate: Callable[..., Tensor], apart: float
) -> None:
    theta, b = torch.full((3,), -0.1, requires_grad=True), torch.full((3,), -0.1 - apart)
    d = torch.tensor([0, 1, 9])

    assert torch.equal(interpolate(theta, b, d, 0.0), theta)
    assert torch.equal(interpolate(theta, b, d, 1.0, "behaviour"), b)
    assert torch.equal(interpolate(b, theta.detach(), d, 1.0, "behaviour"), theta)
    assert torch.equal(interpolate(theta, b, d[:1].expand(3), "inverse", "target"), theta)
    assert torch.equal(interpolate(theta, b, d[:1].expand(3), "inverse", "behaviour"), b)
    assert not interpolate(theta, b, d).requires_grad


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_the_logarithm_of_a_weight_of_zero_reaches_neither_loss_nor_gradient(weight: float) -> None:
    theta = torch.tensor([-0.5, -0.9, -40.0], requires_grad=True)
    b, d, ones = torch.tensor([-0.6, -0.8, -40.5]), torch.tensor([1, 0, 3]), torch.ones(3)
    p = linear_proximal_logprobs(theta, b, d, weight)
    output = decoupled_ppo_loss(theta, b, p, d, ones, ones.bool(), clip_epsilon_low=0.9, clip_epsilon_high=9.0)
    output.loss_sum.backward()

    rho = (theta.detach().double() - b.double()).exp()
    assert theta.grad is not None
    torch.testing.assert_close(theta.grad.double(), -rho, rtol=1e-5, atol=0.0)
    assert output.loss_sum.item() == pytest.approx(-float(rho.sum()), rel=1e-5)
    assert all(map(math.isfinite, as_numbers(output.totals).sums.values()))


@seeded
@given(LOGPROB, LOGPROB, st.integers(0, 1000), st.sampled_from(SCHEDULES), st.sampled_from(["target", "behaviour"]))
def test_every_proximal_policy_lies_between_behaviour_and_target(
    b: float, theta: float, d: int, schedule: Schedule, anchor: Anchor
) -> None:
    rounding = 1e-6 * max(abs(b), abs(theta), 1.0)
    arguments = torch.tensor([theta]), torch.tensor([b]), torch.tensor([d]), schedule, anchor
    logarithms, probabilities = (interpolate(*arguments).item() for interpolate in INTERPOLATIONS)

    assert min(b, theta) - rounding <= logarithms <= max(b, theta) + rounding
    assert min(b, theta) - rounding <= probabilities <= max(b, theta) + rounding
    # The arithmetic mean is never below the geometric one.
    assert probabilities >= logarithms - rounding


@seeded
@given(LOGPROB, LOGPROB, st.integers(0, 1000), st.sampled_from(SCHEDULES), st.sampled_from(["target", "behaviour"]))
def test_both_interpolations_equal_their_formula_in_double_precision(
    b: float, theta: float, d: int, schedule: Schedule, anchor: Anchor
) -> None:
    if d == 0:
        beta = float(anchor == "behaviour")
    else:
        beta = {"inverse": 1 / d, "inverse_sqrt": d**-0.5}.get(str(schedule), 0.0)
        beta = float(schedule) if isinstance(schedule, float) else beta
    arguments = torch.tensor([theta]), torch.tensor([b]), torch.tensor([d]), schedule, anchor
    tolerance: dict[str, Any] = {"rel": 2e-6, "abs": 2e-6}

    assert proximal_logprobs(*arguments).item() == pytest.approx(beta * b + (1 - beta) * theta, **tolerance)
    mixture = beta * math.exp(b) + (1 - beta) * math.exp(theta)
    assert linear_proximal_logprobs(*arguments).item() == pytest.approx(math.log(mixture), **tolerance)


@pytest.mark.parametrize("schedule", ["inverse", "inverse_sqrt", 0.4])
@pytest.mark.parametrize("d", [2, 4, 8])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_schedule_moves_the_edge_of_the_clip_band_and_nothing_else(
    schedule: Schedule, d: int, advantage: float
) -> None:
    beta = behaviour_weight(torch.tensor([d]), schedule).item()
    edge = math.log(1 + HIGH if advantage > 0 else 1 - LOW) / beta
    outwards = 1e-4 * advantage

    def p(theta: Tensor, b: Tensor) -> Tensor:
        return proximal_logprobs(theta, b, torch.tensor([d]), schedule)

    assert slope(edge - outwards, p, advantage) == pytest.approx(-math.exp(edge - outwards) * advantage)
    assert slope(edge + outwards, p, advantage) == 0.0


@pytest.mark.parametrize(("beta", "advantage"), [(0.5, 1.0), (0.25, 1.0), (0.5, -1.0), (0.9, -1.0)])
def test_the_clip_band_of_mixed_probabilities_ends_where_algebra_says(beta: float, advantage: float) -> None:
    """r = 1 / (beta / rho + 1 - beta), so r = bound at rho = beta / (1 / bound - 1 + beta)."""
    edge = math.log(beta / (1 / (1 + HIGH if advantage > 0 else 1 - LOW) - 1 + beta))
    outwards = 1e-4 * advantage

    def p(theta: Tensor, b: Tensor) -> Tensor:
        return linear_proximal_logprobs(theta, b, torch.tensor([2]), beta)

    assert slope(edge - outwards, p, advantage) == pytest.approx(-math.exp(edge - outwards) * advantage)
    assert slope(edge + outwards, p, advantage) == 0.0


def test_a_mixture_with_enough_of_the_target_never_clips_upwards() -> None:
    def p(theta: Tensor, b: Tensor) -> Tensor:
        return linear_proximal_logprobs(theta, b, torch.tensor([2]), 0.2)  # 0.2 < 1 - 1 / 1.3

    assert slope(15.0, p, 1.0) == pytest.approx(-math.exp(15.0))

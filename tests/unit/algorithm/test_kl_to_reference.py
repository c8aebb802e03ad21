"""The KL penalty: its two estimators against double precision."""

import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_a3po.algorithm.loss import kl_to_reference

seeded = settings(max_examples=40, deadline=None, derandomize=True)
LOGPROB = st.floats(-12, 0, width=32)
ESTIMATORS: list[Literal["k1", "k3"]] = ["k1", "k3"]


def logprobs(seed: int = 3, tokens: int = 50) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    theta = -4 * torch.rand(tokens, generator=generator)
    return theta, theta + torch.randn(tokens, generator=generator)


def formula(theta: Tensor, reference: Tensor, estimator: str) -> Tensor:
    rho = reference.exp() / theta.exp()
    return -rho.log() if estimator == "k1" else rho - 1 - rho.log()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_and_gradient_equal_the_formula_in_double_precision(estimator: Literal["k1", "k3"]) -> None:
    values = logprobs()
    theta, exact = values[0].clone().requires_grad_(), values[0].double().requires_grad_()
    ours = kl_to_reference(theta, values[1], estimator)
    expected = formula(exact, values[1].double(), estimator)
    (gradient,) = torch.autograd.grad(ours.sum(), theta)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), exact)

    assert ours.dtype == torch.float32 and ours.shape == theta.shape
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6)


@seeded
@given(LOGPROB, LOGPROB)
def test_k3_is_never_negative(theta: float, reference: float) -> None:
    value = kl_to_reference(torch.tensor([theta]), torch.tensor([reference]), "k3").item()
    exact = math.exp(reference - theta) - 1 - (reference - theta)

    rounding = 3e-7 * math.exp(max(reference - theta, 0.0))
    assert value >= -rounding
    assert value == pytest.approx(exact, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_policy_equal_to_its_reference_costs_nothing_and_gets_no_push_from_k3(
    estimator: Literal["k1", "k3"],
) -> None:
    theta = logprobs()[0].requires_grad_()
    value = kl_to_reference(theta, theta.detach().clone(), estimator)
    (gradient,) = torch.autograd.grad(value.sum(), theta)

    assert value.tolist() == [0.0] * len(theta)
    assert gradient.tolist() == [0.0 if estimator == "k3" else 1.0] * len(theta)


def test_the_reference_gets_no_gradient_and_k3_is_the_default() -> None:
    theta, reference = logprobs()
    reference.requires_grad_()
    value = kl_to_reference(theta, reference)

    assert not value.requires_grad
    assert torch.equal(value, kl_to_reference(theta, reference.detach(), "k3"))


def test_both_estimators_have_the_expectation_of_the_divergence_itself() -> None:
    generator = torch.Generator().manual_seed(1)
    target, reference = torch.log_softmax(torch.randn(2, 9, generator=generator), -1)
    divergence = float((target.double().exp() * (target.double() - reference.double())).sum())

    for estimator in ESTIMATORS:
        expectation = (target.exp() * kl_to_reference(target, reference, estimator)).sum().item()
        assert expectation == pytest.approx(divergence, rel=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("apart", [60.0, 100.0, 500.0, -500.0])
def test_policies_hopelessly_far_apart_have_a_finite_penalty_and_gradient(
    estimator: Literal["k1", "k3"], apart: float
) -> None:
    theta = torch.tensor([-1.0 - max(apart, 0.0)], requires_grad=True)
    value = kl_to_reference(theta, theta.detach() + apart, estimator)
    (gradient,) = torch.autograd.grad(value.sum(), theta)

    assert bool(value.isfinite().all()) and bool(gradient.isfinite().all())
    if estimator == "k3":
        assert value.item() > 0 and math.copysign(1.0, gradient.item()) == -math.copysign(1.0, apart)

"""The objective of a microbatch, whatever its options, against plain formulas in double precision."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_a3po.algorithm.loss import MAX_LOG_RATIO
from megatron_a3po.types import Microbatch
from tests.support.objective_run import METHODS, SHAPES, VERSION, batch, objective, run, without


def proximal_policy(method: str, theta: Tensor, b: Tensor, d: Tensor, recomputed: Tensor) -> Tensor:
    beta = torch.tensor([0.0 if age == 0 else 1 / age for age in d.tolist()], dtype=torch.float64)
    return {
        "loglinear": beta * b + (1 - beta) * theta,
        "linear": (beta * b.exp() + (1 - beta) * theta.exp()).log(),
        "recompute": recomputed,
        "reuse_target": theta,
        "behaviour": b,
    }[method].detach()


def formula(method: str, microbatch: Microbatch, logprobs: Tensor, cap: float = 5.0) -> tuple[float, Tensor]:
    """(loss, gradient [tokens] float64) with clips of 0.2; over the cap, a token gives nothing."""
    leaf, mask = logprobs.double().requires_grad_(), microbatch.loss_mask
    theta, b, a = leaf[mask], microbatch.behaviour_logprobs[mask].double(), microbatch.advantages[mask].double()
    assert microbatch.recomputed_logprobs is not None
    recomputed = microbatch.recomputed_logprobs[mask].double()
    p = proximal_policy(method, theta, b, VERSION - microbatch.weight_versions[mask], recomputed)
    w, r = (p - b).exp(), (theta - p).exp()
    loss = -(torch.where(w > cap, 0.0, w) * torch.minimum(r * a, r.clip(0.8, 1.2) * a)).sum()
    return loss.item(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cap", [5.0, 1.1])
def test_each_method_measures_against_the_policy_that_its_name_says(method: str, cap: float) -> None:
    microbatch, logprobs, entropy = batch()
    loss, gradient = formula(method, microbatch, logprobs, cap)
    keep = microbatch if method == "recompute" else without(microbatch, "recomputed_logprobs")
    result = run(objective(method, weight_cap=cap), without(keep, "reference_logprobs"), logprobs, entropy)

    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(result.on_logprobs.double(), gradient, rtol=1e-5, atol=1e-6)
    assert not result.on_logprobs[~microbatch.loss_mask].any()
    assert result.metrics["loss_tokens"] == sum(response for _, response in SHAPES)
    assert result.metrics["loss"] == pytest.approx(loss / result.metrics["loss_tokens"], rel=1e-5)


def test_the_five_methods_are_five_different_losses() -> None:
    losses = {round(formula(method, *batch()[:2])[0], 4) for method in METHODS}

    assert len(losses) == len(METHODS)


def test_the_entropy_is_a_bonus_with_its_coefficient() -> None:
    microbatch, logprobs, entropy = batch()
    microbatch = without(microbatch, "reference_logprobs", "recomputed_logprobs")
    base = run(objective("loglinear"), microbatch, logprobs, entropy)
    result = run(objective("loglinear", entropy_coefficient=0.3), microbatch, logprobs, entropy)
    total = entropy[microbatch.loss_mask].double().sum().item()

    assert result.loss.item() == pytest.approx(base.loss.item() - 0.3 * total, rel=1e-5)
    assert base.on_entropy is None and result.on_entropy is not None
    torch.testing.assert_close(result.on_entropy, torch.where(microbatch.loss_mask, -0.3, 0.0))
    assert torch.equal(result.on_logprobs, base.on_logprobs)
    for metrics in (base.metrics, result.metrics):
        assert metrics["entropy"] == pytest.approx(total / metrics["loss_tokens"])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("method", ["loglinear", "behaviour"])
def test_the_divergence_from_the_reference_is_a_penalty_with_its_coefficient(estimator: str, method: str) -> None:
    microbatch, logprobs, entropy = batch()
    microbatch = without(microbatch, "recomputed_logprobs")
    base = run(objective(method), without(microbatch, "reference_logprobs"), logprobs, entropy)
    result = run(objective(method, kl_coefficient=0.2, kl_estimator=estimator), microbatch, logprobs, entropy)
    assert microbatch.reference_logprobs is not None
    mask = microbatch.loss_mask
    rho = (microbatch.reference_logprobs.double() - logprobs.double()).exp()
    penalty, slope = (-rho.log(), torch.ones_like(rho)) if estimator == "k1" else (rho - 1 - rho.log(), 1 - rho)

    assert result.loss.item() == pytest.approx(base.loss.item() + 0.2 * penalty[mask].sum().item(), rel=1e-5)
    expected = torch.where(mask, 0.2 * slope, 0.0)
    torch.testing.assert_close((result.on_logprobs - base.on_logprobs).double(), expected, rtol=1e-4, atol=1e-6)
    assert result.metrics["kl_to_reference"] == pytest.approx(penalty[mask].mean().item(), rel=1e-5)
    assert "kl_to_reference" not in base.metrics


@pytest.mark.parametrize("method", METHODS)
def test_the_errors_against_a_forward_pass_are_means_over_the_loss_tokens(method: str) -> None:
    microbatch, logprobs, entropy = batch()
    microbatch = without(microbatch, "reference_logprobs")
    metrics = run(objective(method, compare_with_recompute=True), microbatch, logprobs, entropy).metrics
    mask = microbatch.loss_mask
    assert microbatch.recomputed_logprobs is not None
    theta, b, exact = (
        tensor[mask].double() for tensor in (logprobs, microbatch.behaviour_logprobs, microbatch.recomputed_logprobs)
    )
    p = proximal_policy(method, theta, b, VERSION - microbatch.weight_versions[mask], exact)
    errors = {
        "proximal_error": p - exact,
        "importance_weight_error": (p - b).exp() - (exact - b).exp(),
        "ratio_error": (theta - p).exp() - (theta - exact).exp(),
    }

    for name, error in errors.items():
        assert metrics[name] == pytest.approx(error.abs().mean().item(), rel=1e-4, abs=1e-7)
        assert (metrics[name] == 0.0) is (method == "recompute")


@pytest.mark.parametrize(("apart", "name"), [(100.0, "importance_weight_error"), (-100.0, "ratio_error")])
@pytest.mark.parametrize("method", [method for method in METHODS if method != "recompute"])
def test_an_error_beyond_float32_counts_as_the_largest_ratio_of_the_loss(method: str, apart: float, name: str) -> None:
    """Left out, the worst token would make the mean look better."""
    microbatch, logprobs, entropy = batch()
    microbatch = without(microbatch, "reference_logprobs")
    assert microbatch.recomputed_logprobs is not None
    position = microbatch.loss_mask.nonzero()[4]
    microbatch.recomputed_logprobs[position] = logprobs[position] + apart
    metrics = run(objective(method, compare_with_recompute=True), microbatch, logprobs, entropy).metrics

    assert metrics[name] == pytest.approx(math.exp(MAX_LOG_RATIO) / metrics["loss_tokens"], rel=1e-3)
    assert metrics["proximal_error"] > 90 / metrics["loss_tokens"]


@pytest.mark.parametrize("method", METHODS)
def test_comparing_changes_neither_loss_nor_gradient(method: str) -> None:
    microbatch, logprobs, entropy = batch()
    keep = microbatch if method == "recompute" else without(microbatch, "recomputed_logprobs")
    plain = run(objective(method), keep, logprobs, entropy)
    compared = run(objective(method, compare_with_recompute=True), microbatch, logprobs, entropy)

    assert torch.equal(plain.loss, compared.loss) and torch.equal(plain.on_logprobs, compared.on_logprobs)
    assert objective(method).needs_recomputed_logprobs is (method == "recompute")
    assert objective(method, compare_with_recompute=True).needs_recomputed_logprobs


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, lambda d: 0.0 if d == 0 else 1 / d),
        ({"behaviour_weight": "inverse_sqrt"}, lambda d: 0.0 if d == 0 else d**-0.5),
        ({"behaviour_weight": 0.4, "fresh_anchor": "behaviour"}, lambda d: 1.0 if d == 0 else 0.4),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_the_mean_weight_of_the_behaviour_policy_is_reported_where_there_is_one(
    method: str, algorithm: dict[str, Any], expected: Any
) -> None:
    microbatch, logprobs, entropy = batch()
    metrics = run(objective(method, **algorithm), microbatch, logprobs, entropy).metrics
    ages = (VERSION - microbatch.weight_versions[microbatch.loss_mask]).tolist()
    mean = sum(expected(age) for age in ages) / len(ages)

    assert metrics.get("behaviour_weight_mean") == (pytest.approx(mean) if method in ("loglinear", "linear") else None)


def test_the_seconds_of_the_proximal_policy_add_up() -> None:
    loss = objective("loglinear")
    microbatch, logprobs, entropy = batch()
    seconds = [loss.proximal_seconds]
    for _ in range(2):
        run(loss, microbatch, logprobs, entropy)
        seconds.append(loss.proximal_seconds)

    assert seconds[0] == 0.0 < seconds[1] < seconds[2] < 60.0

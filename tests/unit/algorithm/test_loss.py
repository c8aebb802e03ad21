"""The A-3PO loss against its closed form: whatever the staleness, the gradient is pi_target / pi_behaviour * advantage
inside a band of that ratio, and the band is what staleness moves."""

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_a3po.algorithm.diagnostics import as_numbers
from megatron_a3po.algorithm.loss import MAX_LOG_RATIO, LossOutput, a3po_loss, decoupled_ppo_loss
from megatron_a3po.algorithm.proximal import proximal_logprobs

LOW, HIGH = 0.2, 0.3
CLIP: dict[str, Any] = {"clip_epsilon_low": LOW, "clip_epsilon_high": HIGH}
GARBAGE = [math.nan, math.inf, -math.inf, 1e4, -1e4]
seeded = settings(max_examples=12, deadline=None, derandomize=True)


def closed_form(
    log_rho: float, d: int, advantage: float, dual: float | None = None, cap: float | None = None, mode: str = "mask"
) -> tuple[float, float]:
    """(loss, gradient) of one token in double precision, from log(pi_target / pi_behaviour)."""
    beta = 1 / d if d else 0.0
    w, r = math.exp(log_rho * (1 - beta)), math.exp(log_rho * beta)
    if cap is not None and w > cap:
        w = cap if mode == "clamp" else 0.0
    surrogate, slope = r * advantage, r * advantage
    if advantage > 0 and r > 1 + HIGH:
        surrogate, slope = (1 + HIGH) * advantage, 0.0
    if advantage < 0 and r < 1 - LOW:
        surrogate, slope = (1 - LOW) * advantage, 0.0
    if dual is not None and surrogate < -dual * abs(advantage):
        surrogate, slope = dual * advantage, 0.0
    return -w * surrogate, -w * slope


def one_token(log_rho: float, d: int, advantage: float, **options: Any) -> tuple[float, float]:
    """(loss, gradient) of the code under test for one token with pi_behaviour = 1/e."""
    theta = torch.tensor([log_rho - 1.0], dtype=torch.float64, requires_grad=True)
    b, versions, mask = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([d]), torch.tensor([True])
    loss = a3po_loss(theta, b, versions, torch.tensor([advantage]), mask, **CLIP | options).loss_sum
    loss.backward()
    return loss.item(), gradient(theta)[0].item()


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def count(output: LossOutput, name: str) -> float:
    return float(output.totals.sums[name])


def values(output: LossOutput) -> list[float]:
    """Return all totals."""
    totals = as_numbers(output.totals)
    return [*totals.sums.values(), *totals.maxima.values()]


def batch(seed: int, tokens: int = 64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    b = -3 * torch.rand(tokens, generator=generator)
    return {
        "target_logprobs": b + torch.randn(tokens, generator=generator),
        "behaviour_logprobs": b,
        "staleness": torch.randint(0, 9, (tokens,), generator=generator),
        "advantages": torch.randn(tokens, generator=generator),
        "loss_mask": torch.rand(tokens, generator=generator) < 0.6,
    }


def loss_and_gradient(tensors: dict[str, Any], **options: Any) -> tuple[LossOutput, Tensor]:
    theta = tensors["target_logprobs"].clone().requires_grad_()
    output = a3po_loss(**tensors | {"target_logprobs": theta}, **CLIP | options)
    output.loss_sum.backward()
    return output, gradient(theta)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("d", [1, 2, 4, 8])
def test_the_gradient_is_the_importance_ratio_up_to_the_edge_of_the_band_and_zero_beyond(
    d: int, advantage: float
) -> None:
    edge = d * math.log(1 + HIGH if advantage > 0 else 1 - LOW)
    outwards = 1e-4 if advantage > 0 else -1e-4

    assert one_token(edge - outwards, d, advantage)[1] == pytest.approx(-math.exp(edge - outwards) * advantage)
    assert one_token(edge + outwards, d, advantage)[1] == 0.0
    # At the other edge of the band the clip does not hold back: the token may always return.
    other = d * math.log(1 - LOW if advantage > 0 else 1 + HIGH) - 3 * outwards
    assert one_token(other, d, advantage)[1] == pytest.approx(-math.exp(other) * advantage)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("log_rho", [-5.0, -0.1, 0.0, 0.1, 5.0])
def test_a_fresh_token_is_never_clipped_and_weighs_what_the_two_policies_say(log_rho: float, advantage: float) -> None:
    loss, slope = one_token(log_rho, 0, advantage)

    assert loss == pytest.approx(-math.exp(log_rho) * advantage)
    assert slope == pytest.approx(-math.exp(log_rho) * advantage)


TOKEN = st.tuples(st.floats(-4, 4), st.integers(0, 12), st.floats(-3, 3))


@seeded
@given(
    st.lists(TOKEN, min_size=1, max_size=12),
    st.sampled_from([None, 2.5]),
    st.sampled_from([None, 1.5]),
    st.sampled_from(["mask", "clamp"]),
)
def test_float32_loss_and_gradient_equal_the_closed_form(
    tokens: list[tuple[float, int, float]], dual: float | None, cap: float | None, mode: Literal["mask", "clamp"]
) -> None:
    kept = [token for token in tokens if not on_an_edge(*token[:2])]
    expected = [closed_form(*token, dual, cap, mode) for token in kept]
    b = torch.full((len(kept),), -0.5)
    theta = (b + torch.tensor([log_rho for log_rho, _, _ in kept])).requires_grad_()
    d = torch.tensor([d for _, d, _ in kept], dtype=torch.int64)
    advantages = torch.tensor([advantage for _, _, advantage in kept])
    options: dict[str, Any] = {"dual_clip": dual, "weight_cap": cap, "weight_cap_mode": mode}
    loss = a3po_loss(theta, b, d, advantages, torch.ones(len(kept), dtype=torch.bool), **CLIP, **options).loss_sum
    loss.backward()

    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(sum(loss for loss, _ in expected), rel=1e-4, abs=1e-4)
    torch.testing.assert_close(gradient(theta), torch.tensor([slope for _, slope in expected]), rtol=1e-4, atol=1e-5)


def on_an_edge(log_rho: float, d: int) -> bool:
    """Rounding to float32 decides on which side of a clip or cap the token falls."""
    beta = 1 / d if d else 0.0
    log_w, log_r = log_rho * (1 - beta), log_rho * beta
    return any(abs(log_r - math.log(edge)) < 1e-4 for edge in (1 - LOW, 1 + HIGH, 2.5)) or abs(log_w - 0.405465) < 1e-4


def test_versions_count_per_token_not_per_response() -> None:
    log_rho, versions = 0.45, [0, 1, 2, 0]
    theta = torch.full((4,), log_rho - 1).requires_grad_()
    ones, mask = torch.ones(4), torch.ones(4, dtype=torch.bool)
    a3po_loss(theta, -ones, torch.tensor(versions), ones, mask, **CLIP).loss_sum.backward()

    rho = math.exp(log_rho)  # 1.57: over 1.3, under 1.69
    torch.testing.assert_close(gradient(theta), torch.tensor([-rho, 0.0, -rho, -rho]))


def test_caps_change_the_capped_tokens_alone_and_leave_sums_sums() -> None:
    tensors = batch(1)
    cap = 1.5
    free, free_gradient = loss_and_gradient(tensors)
    w = (proximal_logprobs(*list(tensors.values())[:3]) - tensors["behaviour_logprobs"]).double().exp()
    over = tensors["loss_mask"] & (w > cap)
    for mode, factor in (("mask", torch.zeros_like(w)), ("clamp", cap / w)):
        output, slope = loss_and_gradient(tensors, weight_cap=cap, weight_cap_mode=mode)

        assert 0 < int(over.sum()) == count(output, "capped_tokens")
        assert count(output, "loss_tokens") == count(free, "loss_tokens") == int(tensors["loss_mask"].sum())
        torch.testing.assert_close(slope, torch.where(over, free_gradient * factor, free_gradient).float())
    # No option is a cap of infinity: w is applied all the same.
    assert torch.equal(loss_and_gradient(tensors, weight_cap=1e9)[1], free_gradient)


def test_dual_clip_bounds_the_surrogate_of_negative_advantages_before_the_weight() -> None:
    log_rho, d = 4.0, 2  # w = r = e^2
    for advantage, bounded in ((-2.0, True), (2.0, False)):
        loss, slope = one_token(log_rho, d, advantage, dual_clip=3.0, clip_epsilon_high=99.0)

        assert loss == pytest.approx(math.exp(2) * 3.0 * 2.0 if bounded else -math.exp(4.0) * advantage)
        assert slope == pytest.approx(0.0 if bounded else -math.exp(4.0) * advantage)


def test_a_proximal_policy_recomputed_from_the_same_weights_never_clips() -> None:
    tensors = batch(2)
    theta = tensors["target_logprobs"].clone().requires_grad_()
    output = decoupled_ppo_loss(**tensors | {"target_logprobs": theta}, proximal=theta, **CLIP)
    output.loss_sum.backward()

    rho = (tensors["target_logprobs"].double() - tensors["behaviour_logprobs"].double()).exp()
    expected = torch.where(tensors["loss_mask"], -rho * tensors["advantages"], 0.0)
    torch.testing.assert_close(gradient(theta).double(), expected, rtol=1e-5, atol=1e-7)
    assert count(output, "ratio") == count(output, "used_tokens") > 0
    assert count(output, "clipped_low_tokens") == count(output, "clipped_high_tokens") == 0


def test_no_gradient_reaches_the_target_through_the_proximal_policy_of_a_clipped_token() -> None:
    theta, b = torch.tensor([0.0], requires_grad=True), torch.tensor([-1.0])
    ones, mask = torch.ones(1), torch.ones(1, dtype=torch.bool)
    decoupled_ppo_loss(theta, b, (theta + b) / 2, torch.tensor([2]), ones, mask, **CLIP).loss_sum.backward()

    assert gradient(theta).item() == 0.0


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_masked_positions_leaves_everything_bit_identical(garbage: float) -> None:
    tensors = batch(3)
    options: dict[str, Any] = {"dual_clip": 3.0, "weight_cap": 2.0, "weight_cap_mode": "clamp"}
    clean, clean_gradient = loss_and_gradient(tensors, **options)
    masked = ~tensors["loss_mask"]
    dirty = {
        name: tensor if name == "loss_mask" else torch.where(masked, -1 if name == "staleness" else garbage, tensor)
        for name, tensor in tensors.items()
    }
    output, slope = loss_and_gradient(dirty, **options)

    assert torch.equal(output.loss_sum, clean.loss_sum)
    assert torch.equal(slope, clean_gradient) and bool((slope[masked] == 0).all())
    assert as_numbers(output.totals) == as_numbers(clean.totals)


@pytest.mark.parametrize("name", ["target_logprobs", "behaviour_logprobs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_token_without_finite_logprobs_gives_nothing_and_is_counted(name: str, value: float) -> None:
    tensors = batch(4)
    position = int(tensors["loss_mask"].nonzero()[0])
    without = tensors | {"loss_mask": tensors["loss_mask"].index_fill(0, torch.tensor([position]), False)}
    expected, expected_gradient = loss_and_gradient(without)
    broken = tensors | {name: tensors[name].index_fill(0, torch.tensor([position]), value)}
    output, slope = loss_and_gradient(broken)

    assert torch.equal(output.loss_sum, expected.loss_sum) and torch.equal(slope, expected_gradient)
    assert count(output, "nonfinite_tokens") == 1
    assert count(output, "loss_tokens") == count(expected, "loss_tokens") + 1


@pytest.mark.parametrize("name", ["target_logprobs", "behaviour_logprobs", "proximal"])
def test_a_loss_token_without_a_finite_policy_is_counted_also_with_a_proximal_policy_of_its_own(name: str) -> None:
    tensors = batch(6) | {"loss_mask": torch.ones(64, dtype=torch.bool)}
    tensors |= {"proximal": tensors["behaviour_logprobs"].clone()}
    tensors[name][3] = math.nan
    theta = tensors["target_logprobs"].requires_grad_()
    output = decoupled_ppo_loss(**tensors, **CLIP)
    output.loss_sum.backward()

    assert bool(output.loss_sum.isfinite()) and bool(gradient(theta).isfinite().all())
    assert gradient(theta)[3] == 0 and count(output, "nonfinite_tokens") == 1


@pytest.mark.parametrize("d", [0, 1, 2, 8])
@pytest.mark.parametrize("log_rho", [-500.0, -21.0, 21.0, 500.0])
def test_policies_further_apart_than_e_to_the_20_stay_finite_and_are_counted(log_rho: float, d: int) -> None:
    theta = torch.tensor([log_rho - 1, -1.0]).requires_grad_()
    ones, mask = torch.ones(2), torch.ones(2, dtype=torch.bool)
    output = a3po_loss(theta, -ones, torch.tensor([d, 0]), -ones, mask, **CLIP)
    output.loss_sum.backward()

    # Of w * r with A = -1: e^20 or e^-20 for any d, but nothing where the ratio is below the band.
    expected = math.exp(math.copysign(MAX_LOG_RATIO, log_rho)) if log_rho > 0 or d == 0 else 0.0
    assert gradient(theta)[0].item() == pytest.approx(expected, rel=1e-5)
    assert bool(output.loss_sum.isfinite()) and all(map(math.isfinite, values(output)))
    assert count(output, "clamped_tokens") == 1 and count(output, "nonfinite_tokens") == 0


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_microbatch_without_loss_tokens_has_a_loss_of_zero_with_a_graph(tokens: int) -> None:
    theta = torch.full((tokens,), math.nan, requires_grad=True)
    nothing = torch.zeros(tokens)
    output = a3po_loss(theta, nothing, nothing.long(), nothing, torch.zeros(tokens, dtype=torch.bool), **CLIP)
    output.loss_sum.backward()

    assert output.loss_sum.item() == 0.0
    assert torch.equal(gradient(theta), torch.zeros(tokens))
    assert not any(values(output))


def test_the_gradient_passes_gradcheck_for_a_fixed_proximal_policy() -> None:
    tensors = batch(5, tokens=24)
    theta = tensors["target_logprobs"].double().requires_grad_()
    rest: dict[str, Any] = {name: tensors[name].double() for name in ("behaviour_logprobs", "advantages")}
    proximal = proximal_logprobs(theta, rest["behaviour_logprobs"], tensors["staleness"]) + 0.03

    def loss(theta: Tensor) -> Tensor:
        return decoupled_ppo_loss(
            theta, proximal=proximal, staleness=tensors["staleness"], loss_mask=tensors["loss_mask"], **rest, **CLIP
        ).loss_sum

    assert torch.autograd.gradcheck(loss, (theta,))

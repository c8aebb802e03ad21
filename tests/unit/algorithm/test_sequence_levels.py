"""Ratios and caps at the level of sequences, against a loop over the sequences in double precision."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_a3po.algorithm.diagnostics import as_numbers
from megatron_a3po.algorithm.loss import LossOutput, decoupled_ppo_loss

LOW, HIGH = 0.2, 0.3
CLIP: dict[str, Any] = {"clip_epsilon_low": LOW, "clip_epsilon_high": HIGH}
LENGTHS = [1, 7, 3, 12, 1, 5, 20, 4, 4, 9]
TOKENS = sum(LENGTHS)
LEVELS = [
    {"ratio_level": ratio, "weight_cap_level": level, "weight_cap_mode": mode, "weight_cap": 1.1}
    for ratio in ("token", "sequence")
    for level in ("token", "sequence")
    for mode in ("mask", "clamp")
]
OF_SEQUENCES = [options for options in LEVELS if "sequence" in options.values()]


def batch(seed: int = 0, spread: float = 0.6) -> dict[str, Any]:
    """Ragged sequences, some tokens masked, one sequence wholly; two loss tokens without finite log-probs."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    b = -3 * torch.rand(TOKENS, generator=generator)
    theta = b + spread * torch.randn(TOKENS, generator=generator)
    share = torch.rand(TOKENS, generator=generator)
    mask = (torch.rand(TOKENS, generator=generator) < 0.7) & (ids != 2)
    mask[[12, 30]] = True
    theta[12], b[30] = math.nan, -math.inf
    return {
        "target_logprobs": theta,
        "behaviour_logprobs": b,
        "proximal": torch.lerp(theta, b, share),
        "staleness": torch.randint(0, 4, (TOKENS,), generator=generator),
        "advantages": torch.randn(len(LENGTHS), generator=generator)[ids],
        "loss_mask": mask,
        "sequence_ids": ids,
    }


def values(output: LossOutput) -> list[float]:
    """Return all totals."""
    totals = as_numbers(output.totals)
    return [*totals.sums.values(), *totals.maxima.values()]


def run(tensors: dict[str, Any], **options: Any) -> tuple[LossOutput, Tensor]:
    theta = tensors["target_logprobs"].clone().requires_grad_()
    output = decoupled_ppo_loss(**tensors | {"target_logprobs": theta}, **CLIP | options)
    output.loss_sum.backward()
    assert theta.grad is not None
    return output, theta.grad


def by_a_loop(tensors: dict[str, Any], options: dict[str, Any], dual: float | None = None) -> tuple[float, Tensor, int]:
    """(loss, gradient [tokens] float64, capped tokens), a scalar at a time."""
    theta = tensors["target_logprobs"].double().requires_grad_()
    b, p, advantages = (tensors[name].double() for name in ("behaviour_logprobs", "proximal", "advantages"))
    loss, capped, cap = torch.zeros((), dtype=torch.float64), 0, options["weight_cap"]
    finite = theta.isfinite() & b.isfinite() & p.isfinite()
    for sequence in range(len(LENGTHS)):
        chosen = tensors["loss_mask"] & finite & (tensors["sequence_ids"] == sequence)
        positions = chosen.nonzero()[:, 0].tolist()
        if not positions:
            continue
        mean_r = torch.exp(sum((theta[t] - p[t] for t in positions), torch.zeros(())) / len(positions))
        mean_w = math.exp(sum(float(p[t] - b[t]) for t in positions) / len(positions))
        for t in positions:
            a = float(advantages[t])
            by_sequence = options["ratio_level"] == "sequence"
            r: Tensor = mean_r if by_sequence else torch.exp(theta[t] - p[t])
            w = mean_w if by_sequence else math.exp(float(p[t] - b[t]))
            compared = w if options["weight_cap_level"] == "token" else mean_w
            if compared > cap:
                capped += 1
                w = 0.0 if options["weight_cap_mode"] == "mask" else w * cap / compared
            surrogate = r * a
            if a > 0 and r.item() > 1 + HIGH:
                surrogate = torch.tensor((1 + HIGH) * a, dtype=torch.float64)
            if a < 0 and r.item() < 1 - LOW:
                surrogate = torch.tensor((1 - LOW) * a, dtype=torch.float64)
            if dual is not None and a < 0 and r.item() > dual:
                surrogate = torch.tensor(dual * a, dtype=torch.float64)
            loss = loss - w * surrogate
    (gradient,) = torch.autograd.grad(loss, theta)
    return loss.item(), gradient, capped


@pytest.mark.parametrize("options", LEVELS)
@pytest.mark.parametrize("dual", [None, 1.2])
def test_loss_and_gradient_equal_a_loop_over_ragged_sequences(options: dict[str, Any], dual: float | None) -> None:
    tensors = batch()
    loss, expected, num_capped = by_a_loop(tensors, options, dual)
    output, gradient = run(tensors, **options, dual_clip=dual)
    counts = as_numbers(output.totals).sums

    assert output.loss_sum.item() == pytest.approx(loss, rel=1e-5, abs=1e-5)
    torch.testing.assert_close(gradient.double(), expected.nan_to_num(0.0), rtol=1e-5, atol=1e-6)
    assert counts["capped_tokens"] == num_capped
    assert 0 < num_capped < counts["used_tokens"]
    assert counts["nonfinite_tokens"] == 2


def test_the_options_really_differ_on_that_batch() -> None:
    losses = {run(batch(), **options)[0].loss_sum.item() for options in LEVELS}

    # With one weight per sequence it does not matter at which level it is compared.
    assert len(losses) == len(LEVELS) - 2


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0])
def test_an_unclipped_sequence_has_the_geometric_mean_of_its_ratios_as_the_gradient_of_each_token(scale: float) -> None:
    """Wherever the proximal policy lies: w * r is the mean of pi_target / pi_behaviour."""
    b = torch.tensor([-1.0, -2.0, -0.5])
    theta = b + torch.tensor([0.2, -0.1, 0.5])
    ones = torch.ones(3)
    tensors = {
        "target_logprobs": theta,
        "behaviour_logprobs": b,
        "proximal": torch.lerp(theta, b, scale),
        "staleness": ones.long(),
        "advantages": 2 * ones,
        "loss_mask": ones.bool(),
        "sequence_ids": torch.zeros(3, dtype=torch.int64),
    }
    _, gradient = run(tensors, ratio_level="sequence")

    torch.testing.assert_close(gradient, torch.full((3,), -2 * math.exp(0.6 / 3)))


def test_a_sequence_is_clipped_as_a_whole_at_the_mean_of_its_log_ratios() -> None:
    edge = math.log(1 + HIGH)
    gradients = []
    for mean in (edge - 1e-4, edge + 1e-4):
        b = torch.zeros(4) - 1
        theta = b + mean + torch.tensor([0.9, -0.9, 0.3, -0.3])  # token by token, two would be clipped
        tensors = {
            "target_logprobs": theta,
            "behaviour_logprobs": b,
            "proximal": b,
            "staleness": torch.ones(4, dtype=torch.int64),
            "advantages": torch.ones(4),
            "loss_mask": torch.ones(4, dtype=torch.bool),
            "sequence_ids": torch.full((4,), 3),
        }
        gradients.append(run(tensors, ratio_level="sequence")[1])

    torch.testing.assert_close(gradients[0], torch.full((4,), -(1 + HIGH)), rtol=1e-3, atol=0.0)
    assert gradients[1].tolist() == [0.0] * 4


def test_a_clamped_sequence_keeps_the_proportions_of_its_weights_and_has_the_cap_as_their_mean() -> None:
    log_w = torch.tensor([2.0, 1.0, -0.3, 0.5])
    ones = torch.ones(4)
    tensors = {
        "target_logprobs": log_w - 3,
        "behaviour_logprobs": -3 * ones,
        "proximal": log_w - 3,
        "staleness": ones.long(),
        "advantages": ones,
        "loss_mask": ones.bool(),
        "sequence_ids": torch.zeros(4, dtype=torch.int64),
    }
    _, gradient = run(tensors, weight_cap=1.5, weight_cap_level="sequence", weight_cap_mode="clamp")
    weights = -gradient

    assert weights.log().mean().exp().item() == pytest.approx(1.5)
    torch.testing.assert_close(weights / weights[0], (log_w - log_w[0]).exp())


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e4])
@pytest.mark.parametrize("options", LEVELS)
def test_garbage_in_masked_positions_leaves_loss_and_gradient_bit_identical(
    options: dict[str, Any], garbage: float
) -> None:
    tensors = batch(1)
    clean, clean_gradient = run(tensors, **options, dual_clip=2.0)
    masked = ~tensors["loss_mask"]
    integers = {"staleness": -1, "sequence_ids": 10_000 if garbage > 0 else -1}
    dirty = {
        name: tensor if name == "loss_mask" else torch.where(masked, integers.get(name, garbage), tensor)
        for name, tensor in tensors.items()
    }
    output, gradient = run(dirty, **options, dual_clip=2.0)

    assert torch.equal(output.loss_sum, clean.loss_sum) and bool(clean.loss_sum.isfinite())
    assert torch.equal(gradient, clean_gradient) and bool((gradient[masked] == 0).all())
    assert as_numbers(output.totals) == as_numbers(clean.totals)


@pytest.mark.parametrize("options", OF_SEQUENCES)
@pytest.mark.parametrize("name", ["target_logprobs", "behaviour_logprobs", "proximal"])
def test_a_token_without_finite_logprobs_does_not_count_in_the_mean_of_its_sequence(
    name: str, options: dict[str, Any]
) -> None:
    tensors = batch(2)
    position = torch.tensor([int((tensors["loss_mask"] & (tensors["sequence_ids"] == 6)).nonzero()[1])])
    without = tensors | {"loss_mask": tensors["loss_mask"].index_fill(0, position, False)}
    expected, expected_gradient = run(without, **options)
    output, gradient = run(tensors | {name: tensors[name].index_fill(0, position, math.nan)}, **options)

    assert torch.equal(output.loss_sum, expected.loss_sum) and torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("options", LEVELS)
def test_sequences_may_be_computed_apart_or_in_any_order(options: dict[str, Any]) -> None:
    tensors = batch(3)
    output, gradient = run(tensors, **options)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(9))
    shuffled, shuffled_gradient = run({name: tensor[order] for name, tensor in tensors.items()}, **options)
    parts = [
        run(_numbered_from_zero({name: tensor[part] for name, tensor in tensors.items()}), **options) for part in PARTS
    ]

    torch.testing.assert_close(shuffled.loss_sum, output.loss_sum)
    torch.testing.assert_close(shuffled_gradient, gradient[order])
    torch.testing.assert_close(torch.stack([part.loss_sum for part, _ in parts]).sum(), output.loss_sum)
    torch.testing.assert_close(torch.cat([part_gradient for _, part_gradient in parts]), gradient)


def _numbered_from_zero(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"sequence_ids": tensors["sequence_ids"] - tensors["sequence_ids"].min()}


PARTS = [slice(0, sum(LENGTHS[:4])), slice(sum(LENGTHS[:4]), sum(LENGTHS[:5])), slice(sum(LENGTHS[:5]), TOKENS)]


@pytest.mark.parametrize("options", OF_SEQUENCES)
@pytest.mark.parametrize("tokens", [0, 6])
def test_a_microbatch_without_loss_tokens_has_a_loss_of_zero_with_a_graph(tokens: int, options: dict[str, Any]) -> None:
    tensors = {name: tensor[:tokens] for name, tensor in batch(4).items()}
    output, gradient = run(tensors | {"loss_mask": torch.zeros(tokens, dtype=torch.bool)}, **options)

    assert output.loss_sum.item() == 0.0 and gradient.tolist() == [0.0] * tokens
    assert not any(values(output))


@pytest.mark.parametrize("spread", [50.0, 500.0])
@pytest.mark.parametrize("options", LEVELS)
def test_sequences_far_apart_stay_finite(options: dict[str, Any], spread: float) -> None:
    output, gradient = run(batch(5, spread=spread), **options)

    assert bool(output.loss_sum.isfinite()) and bool(gradient.isfinite().all())
    assert all(map(math.isfinite, values(output)))


@pytest.mark.parametrize("level", ["ratio_level", "weight_cap_level"])
def test_a_level_of_sequences_without_their_numbers_is_refused(level: str) -> None:
    tensors = batch() | {"sequence_ids": None}

    with pytest.raises(ValueError, match="sequence_ids"):
        run(tensors, weight_cap=2.0, **{level: "sequence"})
    run(tensors, weight_cap=2.0)

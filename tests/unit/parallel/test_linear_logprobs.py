"""Log-probs and entropy fused with the output layer, on one rank, against log_softmax in double precision."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_a3po.parallel import vocab_parallel
from megatron_a3po.parallel.vocab_parallel import linear_logprobs_and_entropy, logprobs_and_entropy

TOKENS, HIDDEN, VOCAB = 11, 16, 37
TILES = [(1, 1), (4, 5), (11, 37), (3, 64), (64, 8), (10, 36)]
"""One number at a time; several, the last ones short; one exactly; one in part outside."""


def problem(
    dtype: torch.dtype = torch.float32, columns: int = VOCAB, whole_numbers: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, labels). Small whole numbers have products without rounding."""
    generator = torch.Generator().manual_seed(21)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = 0.8 * torch.randn(columns, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[:2] = torch.tensor([0, VOCAB - 1])
    if whole_numbers:
        hidden, weight = (whole_numbers * hidden).round(), (whole_numbers * weight).round()
    return hidden.to(dtype), weight.to(dtype), labels


def coefficients() -> Tensor:
    return torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(22))


def set_tiles(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    monkeypatch.setattr(vocab_parallel, "_TILE_ROWS", rows)
    monkeypatch.setattr(vocab_parallel, "_TILE_ELEMENTS", rows * columns)


def reference(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def fused(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> list[Tensor]:
    """Log-probs, entropy, and both gradients of a random combination of them."""
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = linear_logprobs_and_entropy(*leaves, labels, None, with_entropy=True, **options)
    on_logprobs, on_entropy = coefficients()
    gradients = torch.autograd.grad((on_logprobs * logprobs + on_entropy * entropy).sum(), leaves)
    return [logprobs.detach(), entropy.detach(), *gradients]


def compare(hidden: Tensor, weight: Tensor, labels: Tensor, *, tolerance: float = 4e-6, **options: Any) -> None:
    leaves = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = leaves[0] @ leaves[1][: options.get("vocab_size")].T
    logprobs, entropy = reference(logits, labels, options.get("temperature", 1.0))
    on_logprobs, on_entropy = coefficients()
    gradients = torch.autograd.grad((on_logprobs * logprobs + on_entropy * entropy).sum(), leaves)
    actual = fused(hidden, weight, labels, **options)

    assert actual[0].dtype == actual[1].dtype == torch.float32
    assert actual[2].dtype == actual[3].dtype == hidden.dtype
    rounding = 0.0 if hidden.dtype == torch.float32 else 2**-8  # a gradient comes back in the dtype of its input
    for ours, theirs in zip(actual[:2], (logprobs, entropy), strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=tolerance, atol=tolerance)
    for ours, theirs, factor in zip(actual[2:], gradients, (weight, hidden), strict=True):
        # Sums of products that may cancel: what rounds is the products.
        size = max(1.0, float(factor[: options.get("vocab_size")].abs().max()))
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance + rounding, atol=tolerance * size)
    if "vocab_size" in options:
        assert not actual[3][options["vocab_size"] :].any()


def test_values_and_both_gradients_equal_log_softmax_in_double_precision() -> None:
    compare(*problem())


@pytest.mark.parametrize("temperature", [0.25, 0.7, 3.0])
def test_the_temperature_divides_the_logits_and_the_gradients(temperature: float) -> None:
    compare(*problem(), temperature=temperature, tolerance=8e-6)


@pytest.mark.parametrize("tile", TILES)
def test_any_tiles_give_the_same_values_and_gradients(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    set_tiles(monkeypatch, *tile)
    compare(*problem())
    compare(*problem(columns=64), temperature=0.7, vocab_size=VOCAB)


@pytest.mark.parametrize("columns", [VOCAB, VOCAB + 1, 64])
@pytest.mark.parametrize("filling", [0.0, 1e4])
def test_padded_rows_of_the_weight_count_for_nothing(
    columns: int, filling: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, labels = problem(columns=columns)
    weight[VOCAB:] = filling
    compare(hidden, weight, labels, vocab_size=VOCAB)
    set_tiles(monkeypatch, 4, 8)  # tiles 5 to 7 are padding only
    compare(hidden, weight, labels, vocab_size=VOCAB)


def test_the_result_equals_that_of_the_padding_cut_off() -> None:
    hidden, weight, labels = problem(columns=64)
    padded = fused(hidden, weight, labels, vocab_size=VOCAB)
    cut = fused(hidden, weight[:VOCAB], labels)

    for ours, theirs in zip(padded[:3], cut[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(padded[3][:VOCAB], cut[3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tile", [(11, 37), (4, 5)])
def test_bfloat16_inputs_are_multiplied_and_summed_in_float32(
    tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tiles(monkeypatch, *tile)
    compare(*problem(torch.bfloat16))
    compare(*problem(torch.bfloat16, columns=40), temperature=0.5, vocab_size=VOCAB, tolerance=8e-6)


@pytest.mark.parametrize("tile", TILES)
def test_logits_of_magnitude_ten_thousand_lose_no_precision(
    tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole numbers, so that the product is exact and whatever is lost would be lost by the softmax."""
    hidden, weight, labels = problem(whole_numbers=2)
    hidden[:, -1], weight[:, -1] = 100.0, 100.0  # a common 10,000
    assert float((hidden @ weight.T).min()) > 9900
    set_tiles(monkeypatch, *tile)
    compare(hidden, weight, labels, tolerance=2e-6)
    compare(-hidden, weight, labels, tolerance=2e-6)

    hidden, weight, labels = problem(whole_numbers=40)
    assert float((hidden @ weight.T).abs().max()) > 1e4
    compare(hidden, weight, labels, tolerance=2e-6)


def test_the_fused_function_equals_the_one_that_sees_the_logits() -> None:
    hidden, weight, labels = problem(columns=64)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    options: dict[str, Any] = {"temperature": 0.7, "vocab_size": VOCAB}
    logprobs, entropy = logprobs_and_entropy(leaves[0] @ leaves[1].T, labels, None, with_entropy=True, **options)
    on_logprobs, on_entropy = coefficients()
    gradients = torch.autograd.grad((on_logprobs * logprobs + on_entropy * entropy).sum(), leaves)

    for ours, theirs in zip(fused(hidden, weight, labels, **options), [logprobs, entropy, *gradients], strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("tile", [(11, 37), (4, 5)])
def test_without_the_option_the_entropy_has_its_value_but_no_gradient(
    tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tiles(monkeypatch, *tile)
    hidden, weight, labels = problem()
    leaf = hidden.clone().requires_grad_()
    logprobs, entropy = linear_logprobs_and_entropy(leaf, weight, labels, None)
    (gradient,) = torch.autograd.grad(logprobs.sum() + 3 * entropy.sum(), leaf)
    log_p = torch.log_softmax(hidden.double() @ weight.double().T, -1)
    expected = (torch.nn.functional.one_hot(labels, VOCAB) - log_p.exp()) @ weight.double()

    assert logprobs.requires_grad and not entropy.requires_grad
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=4e-6, atol=4e-6)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_entropy_alone_can_be_differentiated() -> None:
    hidden, weight, labels = problem()
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    entropy = linear_logprobs_and_entropy(*leaves, labels, None, with_entropy=True)[1]
    ours = torch.autograd.grad(entropy.sum(), leaves)
    theirs = torch.autograd.grad(reference(exact[0] @ exact[1].T, labels, 1.0)[1].sum(), exact)

    for gradient, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-5)


def test_neither_input_is_modified_and_the_gradient_repeats_bit_for_bit() -> None:
    hidden, weight, labels = problem(columns=40)
    before = [tensor.clone() for tensor in (hidden, weight, labels)]
    first = fused(hidden, weight, labels, temperature=0.5, vocab_size=VOCAB)
    second = fused(hidden, weight, labels, temperature=0.5, vocab_size=VOCAB)

    assert all(torch.equal(now, then) for now, then in zip((hidden, weight, labels), before, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_token_that_the_loss_leaves_out_gives_no_gradient() -> None:
    hidden, weight, labels = problem()
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, _ = linear_logprobs_and_entropy(*leaves, labels, None)
    on_hidden, on_weight = torch.autograd.grad(logprobs[3:].sum(), leaves)
    fewer = weight.clone().requires_grad_()
    logprobs, _ = linear_logprobs_and_entropy(hidden[3:], fewer, labels[3:], None)
    (expected,) = torch.autograd.grad(logprobs.sum(), fewer)

    assert not on_hidden[:3].any() and bool(on_hidden[3:].any())
    torch.testing.assert_close(on_weight, expected, rtol=1e-6, atol=1e-6)


def test_no_tokens_at_all_give_empty_values_and_a_gradient_of_zero() -> None:
    leaves = torch.zeros(0, HIDDEN, requires_grad=True), problem()[1].requires_grad_()
    logprobs, entropy = linear_logprobs_and_entropy(*leaves, torch.zeros(0, dtype=torch.int64), None)
    on_hidden, on_weight = torch.autograd.grad(logprobs.sum(), leaves)

    assert logprobs.shape == entropy.shape == (0,)
    assert on_hidden.shape == (0, HIDDEN) and not on_weight.any()

"""Log-probs and entropy on one rank against log_softmax in double precision."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_a3po.parallel import vocab_parallel
from megatron_a3po.parallel.vocab_parallel import logprobs_and_entropy

TOKENS, VOCAB = 11, 37


def problem(scale: float = 3.0, dtype: torch.dtype = torch.float32, columns: int = VOCAB) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    logits = (scale * torch.randn(TOKENS, columns, generator=generator)).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[:2] = torch.tensor([0, VOCAB - 1])
    return logits, labels


def weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(12)
    return torch.randn(TOKENS, generator=generator), torch.randn(TOKENS, generator=generator)


def reference(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def compare(logits: Tensor, labels: Tensor, *, tolerance: float, **options: Any) -> None:
    """Values and gradients of a random combination of log-probs and entropy."""
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    on_logprobs, on_entropy = weights()
    logprobs, entropy = logprobs_and_entropy(ours, labels, None, with_entropy=True, **options)
    (on_logprobs * logprobs + on_entropy * entropy).sum().backward()
    expected_logprobs, expected_entropy = reference(theirs[:, :VOCAB], labels, options.get("temperature", 1.0))
    (on_logprobs * expected_logprobs + on_entropy * expected_entropy).sum().backward()

    assert logprobs.dtype == entropy.dtype == torch.float32
    assert_near(logprobs, expected_logprobs, tolerance)
    assert_near(entropy, expected_entropy, tolerance)
    assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == logits.dtype
    rounding = 0.0 if logits.dtype == torch.float32 else 2**-8  # the gradient itself is in the logits' precision
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=tolerance + rounding, atol=tolerance)
    assert not ours.grad[:, VOCAB:].any()


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_values_and_gradients_equal_log_softmax_in_double_precision() -> None:
    compare(*problem(), tolerance=2e-6)


@pytest.mark.parametrize("temperature", [0.25, 0.7, 3.0])
def test_the_temperature_divides_the_logits_and_their_gradient(temperature: float) -> None:
    compare(*problem(), tolerance=5e-6, temperature=temperature)


@pytest.mark.parametrize("padding", [1, 27])
@pytest.mark.parametrize("filling", [0.0, 1e4, float("inf"), float("nan")])
def test_padded_columns_count_for_nothing_whatever_they_hold(padding: int, filling: float) -> None:
    logits, labels = problem(columns=VOCAB + padding)
    logits[:, VOCAB:] = filling

    compare(logits, labels, tolerance=2e-6, vocab_size=VOCAB)


def test_logits_of_magnitude_ten_thousand_lose_no_precision() -> None:
    """Log-probs are differences of logits: the size of the logits cancels, and so must its rounding."""
    logits, labels = problem()
    for offset in (1e4, -1e4):
        compare((logits + offset).float(), labels, tolerance=2e-6)
    compare(*problem(scale=1e4), tolerance=2e-6)


def test_bfloat16_logits_are_computed_with_in_float32() -> None:
    compare(*problem(dtype=torch.bfloat16), tolerance=2e-6)
    compare(*problem(dtype=torch.bfloat16, columns=VOCAB + 3), tolerance=4e-6, temperature=0.5, vocab_size=VOCAB)


def test_the_result_does_not_depend_on_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = problem()

    def run() -> list[Tensor]:
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = logprobs_and_entropy(leaf, labels, None, with_entropy=True)
        (logprobs * weights()[0] + entropy * weights()[1]).sum().backward()
        assert leaf.grad is not None
        return [logprobs, entropy, leaf.grad]

    whole = run()
    for rows in (1, 4, 5):  # 11 rows: none, one and several tiles, the last one short
        monkeypatch.setattr(vocab_parallel, "_TILE_ELEMENTS", rows * VOCAB + VOCAB // 2)
        assert all(torch.equal(tiled, expected) for tiled, expected in zip(run(), whole, strict=True))
    monkeypatch.setattr(vocab_parallel, "_TILE_ELEMENTS", 1)
    assert all(torch.equal(tiled, expected) for tiled, expected in zip(run(), whole, strict=True))


def test_without_the_option_the_entropy_carries_no_gradient_and_has_the_same_value() -> None:
    logits, labels = problem()
    gradients = []
    for with_entropy in (False, True):
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = logprobs_and_entropy(leaf, labels, None, with_entropy=with_entropy)
        (logprobs.sum() + 3 * entropy.sum()).backward()
        assert entropy.requires_grad is with_entropy
        assert_near(entropy.detach(), reference(logits, labels)[1], 2e-6)
        gradients.append(leaf.grad)
    expected = torch.nn.functional.one_hot(labels, VOCAB) - torch.softmax(logits.double(), -1)

    assert gradients[0] is not None and gradients[1] is not None
    assert_near(gradients[0], expected, 2e-6)
    assert not torch.allclose(gradients[0], gradients[1], atol=1e-3)


def test_the_entropy_alone_can_be_differentiated() -> None:
    logits, labels = problem()
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logprobs_and_entropy(ours, labels, None, with_entropy=True)[1].sum().backward()
    reference(theirs, labels)[1].sum().backward()

    assert ours.grad is not None and theirs.grad is not None
    assert_near(ours.grad, theirs.grad, 2e-6)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0, 1e4])
def test_no_logprob_is_positive_and_no_entropy_negative(scale: float) -> None:
    logits, _ = problem(scale=scale)
    for column in range(0, VOCAB, 5):
        logprobs, entropy = logprobs_and_entropy(logits, torch.full((TOKENS,), column), None)

        assert bool((logprobs <= 0).all()) and bool((entropy >= 0).all())
    best, _ = logprobs_and_entropy(logits, logits.argmax(-1), None)
    assert bool((best <= 0).all()) and bool((best > -4).all())


def test_the_logits_are_not_modified() -> None:
    logits, labels = problem()
    before = logits.clone()
    leaf = logits.requires_grad_()
    logprobs_and_entropy(leaf, labels, None, temperature=0.5, vocab_size=20)[0].sum().backward()

    assert torch.equal(leaf, before)


def test_a_certain_token_has_a_logprob_of_zero_and_no_entropy() -> None:
    logits = torch.full((2, VOCAB), -200.0)
    logits[:, 5] = 200.0
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([5, 6]), None)

    assert logprobs.tolist() == [0.0, -400.0]
    assert entropy.tolist() == [0.0, 0.0]

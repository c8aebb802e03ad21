"""A token whose hidden states are finite and whose logits overflow: left out of the loss, it is in no gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_a3po.parallel import vocab_parallel
from megatron_a3po.parallel.vocab_parallel import linear_logprobs_and_entropy, logprobs_and_entropy

TOKENS, HIDDEN, VOCAB, BROKEN, TEMPERATURE = 11, 16, 37, 4, 0.7
OTHERS = torch.arange(TOKENS) != BROKEN


def problem(scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, labels); the hidden states of token `BROKEN` are multiplied by `scale`."""
    generator = torch.Generator().manual_seed(41)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    hidden[BROKEN] = scale * hidden[BROKEN].sign()
    return hidden.to(dtype), weight.to(dtype), torch.randint(0, VOCAB, (TOKENS,), generator=generator)


def run(entry: str, terms: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """Log-probs, entropy, and the gradients of hidden and weight of a combination without token `BROKEN`."""
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    options: dict[str, Any] = {"temperature": TEMPERATURE, "with_entropy": "entropy" in terms}
    if entry == "fused":
        logprobs, entropy = linear_logprobs_and_entropy(*leaves, labels, None, **options)
    else:
        logprobs, entropy = logprobs_and_entropy(leaves[0] @ leaves[1].T, labels, None, **options)
    gradients = torch.autograd.grad(objective(terms, logprobs, entropy), leaves)
    return [logprobs.detach(), entropy.detach(), *gradients]


def objective(terms: str, logprobs: Tensor, entropy: Tensor, tokens: Tensor = OTHERS) -> Tensor:
    on_logprobs, on_entropy = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(42))[:, OTHERS]
    total = torch.zeros(())
    if "logprobs" in terms:
        total = total + (on_logprobs * logprobs[tokens]).sum()
    if "entropy" in terms:
        total = total + (on_entropy * entropy[tokens]).sum()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [(1024, 512), (3, 5)])
@pytest.mark.parametrize("terms", ["logprobs", "entropy", "logprobs and entropy"])
@pytest.mark.parametrize("entry", ["fused", "logits"])
def test_a_token_without_gradient_leaves_all_others_as_they_are_when_its_logits_overflow(
    entry: str, terms: str, tile: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab_parallel, "_TILE_ROWS", tile[0])
    monkeypatch.setattr(vocab_parallel, "_TILE_ELEMENTS", tile[0] * tile[1])
    clean = run(entry, terms, *problem(1.0, dtype))
    hidden, weight, labels = problem(3e38, dtype)
    broken = run(entry, terms, hidden, weight, labels)

    assert bool(hidden.isfinite().all()) and not bool((hidden @ weight.T)[BROKEN].isfinite().all())
    assert bool(broken[0][BROKEN].isnan()) and not broken[2][BROKEN].any()
    for now, then in zip(broken[:3], clean[:3], strict=True):
        assert torch.equal(now[OTHERS], then[OTHERS])
    assert torch.equal(broken[3], clean[3])

    leaves = hidden[OTHERS].double().requires_grad_(), weight.double().requires_grad_()
    log_p = (leaves[0] @ leaves[1].T / TEMPERATURE).log_softmax(-1)
    everything = torch.ones(TOKENS - 1, dtype=torch.bool)
    logprobs = log_p.gather(-1, labels[OTHERS, None])[:, 0]
    exact = torch.autograd.grad(objective(terms, logprobs, -(log_p.exp() * log_p).sum(-1), everything), leaves)
    # From logits in bf16, these and their gradient round as well.
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7 if entry == "fused" else 0.2
    torch.testing.assert_close(broken[2][OTHERS].double(), exact[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(broken[3].double(), exact[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("entry", ["fused", "logits"])
def test_where_such_a_token_is_part_of_the_loss_the_gradient_says_so(entry: str) -> None:
    """The optimizer skips a step whose gradient is not finite; zeros would hide what is broken."""
    hidden, weight, labels = problem(3e38, torch.float32)
    leaf = weight.clone().requires_grad_()
    if entry == "fused":
        logprobs, _ = linear_logprobs_and_entropy(hidden, leaf, labels, None)
    else:
        logprobs, _ = logprobs_and_entropy(hidden @ leaf.T, labels, None)
    (gradient,) = torch.autograd.grad(logprobs.sum(), leaf)

    assert bool(gradient.isnan().any())

"""The fused output layer on a GPU: Triton forward and tensor-core backward against double precision on the CPU."""

import pytest
import torch

from megatron_a3po.parallel.vocab_parallel import linear_logprobs_and_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("tokens", "hidden_size", "columns", "real"), [(300, 256, 5000, 4801), (7, 64, 130, 130)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_values_and_gradients_equal_double_precision(
    tokens: int, hidden_size: int, columns: int, real: int, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to("cuda", dtype).requires_grad_()
    weight = (0.2 * torch.randn(columns, hidden_size, generator=generator)).to("cuda", dtype).requires_grad_()
    labels = torch.randint(0, real, (tokens,), generator=generator).cuda()

    logprobs, entropy = linear_logprobs_and_entropy(
        hidden, weight, labels, None, temperature=0.7, vocab_size=real, with_entropy=True
    )
    gradients = torch.autograd.grad((logprobs + 0.3 * entropy).sum(), (hidden, weight))

    x, w = (tensor.detach().cpu().double().requires_grad_() for tensor in (hidden, weight))
    log_p = ((x @ w.T)[:, :real] / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, labels.cpu()[:, None])[:, 0]
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    expected_gradients = torch.autograd.grad((expected + 0.3 * expected_entropy).sum(), (x, w))
    # The products themselves are exact to float32 in either dtype: their factors are what they are.
    torch.testing.assert_close(logprobs.cpu().double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.cpu().double(), expected_entropy, rtol=1e-5, atol=1e-4)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_the_loss_leaves_out_is_in_no_gradient_when_its_logits_overflow(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(300, 256, generator=generator).sign()
    weight = torch.randn(5000, 256, generator=generator).to("cuda", dtype).requires_grad_()
    labels = torch.randint(0, 5000, (300,), generator=generator).cuda()
    used, results = torch.arange(300, device="cuda") != 7, []
    for size in (1.0, 3e38):
        hidden[7] = size * hidden[7].sign()
        leaf = hidden.to("cuda", dtype, copy=True).requires_grad_()
        logprobs, entropy = linear_logprobs_and_entropy(leaf, weight, labels, None, with_entropy=True)
        assert logprobs[7].isfinite() == (size == 1.0)
        gradients = torch.autograd.grad((logprobs + 0.3 * entropy)[used].sum(), (leaf, weight))
        results.append([logprobs.detach()[used], entropy.detach()[used], *gradients])

    assert all(torch.equal(broken, clean) for clean, broken in zip(*results, strict=True))

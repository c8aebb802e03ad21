"""The output layer fused with log-probs and entropy, on two and four ranks, against one rank in double precision."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_a3po.parallel import vocab_parallel
from megatron_a3po.parallel.vocab_parallel import linear_logprobs_and_entropy
from tests.distributed.launch import run_ranks

CASES = {
    # vocabulary, columns per rank: padded and not divisible, a rank in part padding, the last rank all padding, none.
    2: [(37, 19), (33, 24), (24, 24), (20, 30), (64, 32)],
    4: [(37, 10), (37, 12), (37, 16), (5, 16), (64, 16)],
}
TILES = [(1024, 4096), (3, 5)]
HIDDEN, TEMPERATURE = 8, 0.7


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_has_the_whole_gradient_of_hidden_and_that_of_its_own_rows(world_size: int) -> None:
    output = run_ranks(_compare_with_one_rank, world_size)

    assert f"compared {len(CASES[world_size])} cases" in output


def _compare_with_one_rank() -> None:
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    cases = CASES[dist.get_world_size()]
    for vocab_size, columns in cases:
        for rows, tile_columns in TILES:
            vocab_parallel._TILE_ROWS, vocab_parallel._TILE_ELEMENTS = rows, rows * tile_columns
            for scale in (1, 60):
                _compare(vocab_size, columns, scale, dist.group.WORLD)
    _one_token_of_no_weight(dist.group.WORLD)
    _a_token_left_out_whose_logits_overflow_on_the_last_rank(dist.group.WORLD)
    print(f"compared {len(cases)} cases", flush=True)
    dist.destroy_process_group()


def _compare(vocab_size: int, columns: int, scale: int, group: dist.ProcessGroup) -> None:
    generator = torch.Generator().manual_seed(vocab_size * columns)
    labels = torch.tensor(_labels_at_edges(vocab_size, columns, group.size()))
    # Whole numbers, whose products are exact: at the larger scale the logits are of magnitude 1e4.
    hidden = (scale * torch.randn(len(labels), HIDDEN, generator=generator)).round()
    weight = (scale * torch.randn(columns * group.size(), HIDDEN, generator=generator)).round()
    on_logprobs, on_entropy = torch.randn(2, len(labels), generator=generator)
    weight[vocab_size:] = 1e4  # what stands in the padding must not matter

    mine = slice(group.rank() * columns, (group.rank() + 1) * columns)
    ours = hidden.clone().requires_grad_(), weight[mine].clone().requires_grad_()
    logprobs, entropy = linear_logprobs_and_entropy(
        *ours, labels, group, temperature=TEMPERATURE, vocab_size=vocab_size, with_entropy=True
    )
    on_hidden, on_weight = torch.autograd.grad((on_logprobs * logprobs + on_entropy * entropy).sum(), ours)

    whole = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = torch.log_softmax((whole[0] @ whole[1].T)[:, :vocab_size] / TEMPERATURE, -1)
    expected_logprobs = log_p.gather(-1, labels[:, None])[:, 0]
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    gradients = torch.autograd.grad((on_logprobs * expected_logprobs + on_entropy * expected_entropy).sum(), whole)

    # Dividing by the temperature rounds logits in float32; at the larger scale that is 1e-3, whoever computes it.
    tolerance = 4e-6 if scale == 1 else 2e-3
    for actual, expected, size in (
        (logprobs, expected_logprobs, 1),
        (entropy, expected_entropy, 1),
        (on_hidden, gradients[0], scale),
        (on_weight, gradients[1][mine], scale),
    ):
        torch.testing.assert_close(actual.double(), expected, rtol=4e-6, atol=tolerance * size)
    assert not on_weight[max(0, vocab_size - mine.start) :].any()
    _assert_equal_on_all_ranks(torch.stack([logprobs.detach(), entropy.detach()]), group)
    _assert_equal_on_all_ranks(on_hidden, group)


def _one_token_of_no_weight(group: dist.ProcessGroup) -> None:
    """As on a rank without loss tokens: the same collectives, and gradients of zero that do exist."""
    hidden, weight = torch.ones(1, HIDDEN, requires_grad=True), torch.ones(4, HIDDEN, requires_grad=True)
    logprobs, _ = linear_logprobs_and_entropy(hidden, weight, torch.zeros(1, dtype=torch.int64), group)
    gradients = torch.autograd.grad((0.0 * logprobs).sum(), (hidden, weight))
    assert not any(gradient.any() for gradient in gradients)


def _a_token_left_out_whose_logits_overflow_on_the_last_rank(group: dist.ProcessGroup) -> None:
    """On the others its logits are finite, and the normaliser is not."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(5, HIDDEN, generator=generator), torch.randn(6, HIDDEN, generator=generator)
    weight[:, 0] = 2.0 if group.rank() == group.size() - 1 else 0.0
    labels, gradients = torch.arange(5), []
    for size in (1.0, 3e38):
        hidden[2] = 0.0
        hidden[2, 0] = size
        assert (hidden @ weight.T).isfinite().all() == (size == 1.0 or group.rank() < group.size() - 1)
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, _ = linear_logprobs_and_entropy(*leaves, labels, group)
        assert logprobs[2].isfinite() == (size == 1.0)
        gradients.append(torch.autograd.grad(logprobs[labels != 2].sum(), leaves))
    assert all(torch.equal(broken, clean) and clean.any() for clean, broken in zip(*gradients, strict=True))


def _labels_at_edges(vocab_size: int, columns: int, num_ranks: int) -> list[int]:
    """First and last label of every rank, and of the vocabulary."""
    edges = [edge for rank in range(num_ranks) for edge in (rank * columns, (rank + 1) * columns - 1)]
    return [edge for edge in edges if edge < vocab_size] + [vocab_size - 1]


def _assert_equal_on_all_ranks(values: Tensor, group: dist.ProcessGroup) -> None:
    gathered = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(gathered, values.contiguous(), group=group)
    assert all(torch.equal(other, values) for other in gathered), "ranks disagree in some bit"

"""Vocab-parallel log-probs and entropy on two and four ranks against log_softmax of the whole vocabulary."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_a3po.parallel.vocab_parallel import logprobs_and_entropy
from tests.distributed.launch import run_ranks

CASES = {
    # vocabulary, columns per rank: padded and not divisible, a rank in part padding, the last rank all padding, none.
    2: [(37, 19), (33, 24), (24, 24), (20, 30), (64, 32)],
    4: [(37, 10), (37, 12), (37, 16), (5, 16), (64, 16)],
}
TEMPERATURE = 0.7


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_has_the_logprobs_entropy_and_gradient_of_the_whole_vocabulary(world_size: int) -> None:
    output = run_ranks(_compare_with_log_softmax, world_size, timeout_seconds=60)

    assert f"compared {len(CASES[world_size])} cases" in output


def _compare_with_log_softmax() -> None:
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    cases = CASES[dist.get_world_size()]
    for vocab_size, columns in cases:
        for scale in (3.0, 1e4):
            _compare(vocab_size, columns, scale, dist.group.WORLD)
    print(f"compared {len(cases)} cases", flush=True)
    dist.destroy_process_group()


def _compare(vocab_size: int, columns: int, scale: float, group: dist.ProcessGroup) -> None:
    generator = torch.Generator().manual_seed(vocab_size * columns)
    labels = torch.tensor(_labels_at_edges(vocab_size, columns, group.size()))
    logits = scale * torch.randn(len(labels), columns * group.size(), generator=generator)
    on_logprobs, on_entropy = torch.randn(2, len(labels), generator=generator)
    logits[:, vocab_size:] = torch.nan  # what stands in the padding must not matter

    mine = slice(group.rank() * columns, (group.rank() + 1) * columns)
    shard = logits[:, mine].clone().requires_grad_()
    logprobs, entropy = logprobs_and_entropy(
        shard, labels, group, temperature=TEMPERATURE, vocab_size=vocab_size, with_entropy=True
    )
    (on_logprobs * logprobs + on_entropy * entropy).sum().backward()

    whole = logits.double().requires_grad_()
    log_p = torch.log_softmax(whole[:, :vocab_size] / TEMPERATURE, -1)
    expected_logprobs = log_p.gather(-1, labels[:, None])[:, 0]
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    (on_logprobs * expected_logprobs + on_entropy * expected_entropy).sum().backward()

    # Dividing by the temperature rounds logits in float32; at this scale that is 1e-3, whoever computes it.
    tolerance = 4e-6 * max(1.0, scale / 30)
    assert shard.grad is not None and whole.grad is not None
    for actual, expected in (
        (logprobs, expected_logprobs),
        (entropy, expected_entropy),
        (shard.grad, whole.grad[:, mine]),
    ):
        torch.testing.assert_close(actual.double(), expected, rtol=4e-6, atol=tolerance)
    assert not shard.grad[:, max(0, vocab_size - mine.start) :].any()
    _assert_equal_on_all_ranks(torch.stack([logprobs.detach(), entropy.detach()]), group)


def _labels_at_edges(vocab_size: int, columns: int, num_ranks: int) -> list[int]:
    """First and last label of every rank, and of the vocabulary."""
    edges = [edge for rank in range(num_ranks) for edge in (rank * columns, (rank + 1) * columns - 1)]
    return [edge for edge in edges if edge < vocab_size] + [vocab_size - 1]


def _assert_equal_on_all_ranks(values: Tensor, group: dist.ProcessGroup) -> None:
    gathered = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(gathered, values, group=group)
    assert all(torch.equal(other, values) for other in gathered), "ranks disagree in some bit"

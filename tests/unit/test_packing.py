"""Packing: every sequence once, in bounds, and every loss token with what belongs to it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_a3po.data.packing import assign_microbatches, pack
from megatron_a3po.errors import DataError
from megatron_a3po.types import FinishReason, Microbatch, Trajectory

CPU = torch.device("cpu")
seeded = settings(max_examples=60, deadline=None, derandomize=True)
SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=6)


def trajectory(prompt_length: int, response_length: int, number: int = 0) -> Trajectory:
    """One whose every value is different from every other's."""
    start = 1 + 100 * number
    return Trajectory(
        prompt_id=f"p{number}",
        group_id=number,
        token_ids=torch.arange(start, start + prompt_length + response_length),
        prompt_length=prompt_length,
        behaviour_logprobs=-(torch.arange(response_length) + start) / 1000,
        weight_versions=torch.arange(response_length) + start,
        reward=0.0,
        finish_reason=FinishReason.STOP,
    )


def packed(shapes: list[tuple[int, int]], multiple_of: int = 1) -> tuple[list[Trajectory], Microbatch]:
    trajectories = [trajectory(*shape, number) for number, shape in enumerate(shapes)]
    advantages = torch.arange(len(shapes)) + 0.5
    return trajectories, pack(trajectories, advantages, multiple_of=multiple_of, device=CPU)


def place_longest_first(lengths: list[int], count: int, max_tokens: int) -> bool:
    """Does putting each sequence, longest first, into the emptiest of `count` microbatches respect the bound?"""
    loads = [0] * count
    for length in sorted(lengths, reverse=True):
        loads[loads.index(min(loads))] += length
    return max(loads) <= max_tokens


@seeded
@given(st.lists(st.integers(1, 50), min_size=4, max_size=60), st.integers(50, 130), st.integers(1, 4))
def test_every_sequence_is_in_exactly_one_microbatch_and_none_is_over_the_bound(
    lengths: list[int], max_tokens: int, num_ranks: int
) -> None:
    ranks = assign_microbatches(lengths, max_tokens, num_ranks)
    loads = [sum(lengths[index] for index in microbatch) for rank in ranks for microbatch in rank]

    assert sorted(index for rank in ranks for microbatch in rank for index in microbatch) == list(range(len(lengths)))
    assert max(loads) <= max_tokens
    assert max(loads) - min(loads) <= max(lengths), "the emptiest microbatch should have taken the last sequence"
    # The same number on every rank, or they would wait for each other in a collective; and no more than needed.
    assert len(ranks) == num_ranks and len({len(rank) for rank in ranks}) == 1
    fewer = len(loads) - num_ranks
    assert fewer == 0 or sum(lengths) > fewer * max_tokens or not place_longest_first(lengths, fewer, max_tokens)


def test_more_microbatches_than_sequences_leave_some_empty() -> None:
    ranks = assign_microbatches([10, 10, 10], 10, 2)

    assert sorted(len(microbatch) for rank in ranks for microbatch in rank) == [0, 1, 1, 1]
    assert [len(rank) for rank in ranks] == [2, 2]


def test_a_sequence_over_the_bound_and_too_few_sequences_are_errors_with_a_remedy() -> None:
    with pytest.raises(DataError, match=r"a sequence of 11 tokens .* actor\.microbatch_tokens = 10; raise it"):
        assign_microbatches([3, 11], 10, 1)
    with pytest.raises(DataError, match="1 sequences cannot feed 2 data-parallel ranks"):
        assign_microbatches([3], 10, 2)
    with pytest.raises(DataError, match="0 sequences"):
        assign_microbatches([], 10, 1)


@seeded
@given(SHAPES, st.sampled_from([1, 2, 4, 8]))
def test_every_loss_token_carries_what_the_server_said_about_it(
    shapes: list[tuple[int, int]], multiple_of: int
) -> None:
    trajectories, microbatch = packed(shapes, multiple_of)
    expected: list[dict[str, Any]] = []
    for number, item in enumerate(trajectories):
        ids = item.token_ids.tolist()
        for position in range(len(ids) - 1):  # predicts the token after it
            response = position + 1 - item.prompt_length
            answered = response >= 0
            expected.append(
                {
                    "token_ids": ids[position],
                    "labels": ids[position + 1],
                    "position_ids": position,
                    "loss_mask": answered,
                    "behaviour_logprobs": item.behaviour_logprobs[response].item() if answered else None,
                    "weight_versions": item.weight_versions[response].item() if answered else -1,
                    "advantages": number + 0.5 if answered else 0.0,
                }
            )
    for index, token in enumerate(expected):
        for name, value in token.items():
            assert value is None or getattr(microbatch, name)[index].item() == value, (name, index)
    padding = microbatch.token_ids.numel() - len(expected)
    assert not microbatch.loss_mask[len(expected) :].any()
    assert microbatch.position_ids[len(expected) :].tolist() == list(range(padding))
    assert 0 <= padding <= (multiple_of if not shapes else multiple_of - 1)
    assert microbatch.token_ids.numel() % multiple_of == 0 and microbatch.token_ids.numel() > 0


@seeded
@given(SHAPES, st.sampled_from([1, 4]))
def test_cu_seqlens_bound_every_sequence_and_the_padding(shapes: list[tuple[int, int]], multiple_of: int) -> None:
    _, microbatch = packed(shapes, multiple_of)
    total = microbatch.token_ids.numel()
    lengths = [prompt + response - 1 for prompt, response in shapes]
    lengths += [total - sum(lengths)] * (total > sum(lengths))

    assert microbatch.cu_seqlens.dtype == torch.int32
    assert microbatch.cu_seqlens.tolist() == [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    assert microbatch.max_seqlen == max(lengths)
    assert all(getattr(microbatch, name).shape == (total,) for name, _ in DTYPES)


DTYPES = [
    ("token_ids", torch.int64),
    ("labels", torch.int64),
    ("position_ids", torch.int64),
    ("loss_mask", torch.bool),
    ("behaviour_logprobs", torch.float32),
    ("weight_versions", torch.int64),
    ("advantages", torch.float32),
]


def test_no_trajectory_gives_a_microbatch_of_padding_alone() -> None:
    _, microbatch = packed([], multiple_of=4)

    assert microbatch.cu_seqlens.tolist() == [0, 4] and microbatch.max_seqlen == 4
    assert not microbatch.loss_mask.any() and microbatch.weight_versions.tolist() == [-1] * 4
    assert [(name, getattr(microbatch, name).dtype) for name, _ in DTYPES] == DTYPES


def test_a_loss_token_without_a_weight_version_is_refused() -> None:
    item = trajectory(2, 3)
    item.weight_versions[1] = -1

    with pytest.raises(AssertionError, match="weight version"):
        pack([item], torch.ones(1), multiple_of=1, device=CPU)


@pytest.mark.parametrize("num_advantages", [0, 1, 3])
def test_an_advantage_too_few_or_too_many_is_an_error_and_not_a_lost_trajectory(num_advantages: int) -> None:
    with pytest.raises(ValueError):
        pack([trajectory(2, 3), trajectory(1, 2)], torch.ones(num_advantages), multiple_of=1, device=CPU)

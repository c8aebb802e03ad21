"""Packing: every sequence once, in bounds, and every loss token with what belongs to it."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_a3po.batching.packing import pack, split_groups
from megatron_a3po.types import Alignment, FinishReason, Microbatch, Trajectory

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
    return trajectories, pack(trajectories, advantages, alignment=Alignment(rank_multiple=multiple_of), device=CPU)


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
    ("sequence_ids", torch.int64),
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
        pack([item], torch.ones(1), alignment=Alignment(), device=CPU)


@pytest.mark.parametrize("num_advantages", [0, 1, 3])
def test_an_advantage_too_few_or_too_many_is_an_error_and_not_a_lost_trajectory(num_advantages: int) -> None:
    with pytest.raises(ValueError):
        pack([trajectory(2, 3), trajectory(1, 2)], torch.ones(num_advantages), alignment=Alignment(), device=CPU)


@seeded
@given(SHAPES, st.sampled_from([2, 3, 4]), st.sampled_from([1, 2, 16]))
def test_context_parallel_ranks_hold_every_token_once_in_chunks_from_both_ends(
    shapes: list[tuple[int, int]], size: int, rank_multiple: int
) -> None:
    trajectories = [trajectory(*shape, number) for number, shape in enumerate(shapes)]
    advantages = torch.arange(len(shapes)) + 0.5
    parts = [
        pack(
            trajectories,
            advantages,
            alignment=Alignment(context_size=size, context_rank=rank, rank_multiple=rank_multiple),
            device=CPU,
        )
        for rank in range(size)
    ]
    bounds = parts[0].cu_seqlens.tolist()
    assert all(part.cu_seqlens.tolist() == bounds and part.max_seqlen == parts[0].max_seqlen for part in parts)
    assert {part.token_ids.numel() for part in parts} == {bounds[-1] // size} and bounds[
        -1
    ] // size % rank_multiple == 0

    whole = {name: torch.cat(_joined(name, parts, bounds)) for name, _ in DTYPES}
    for number, (item, start) in enumerate(zip(trajectories, bounds, strict=False)):
        end = start + item.token_ids.numel() - 1
        assert whole["token_ids"][start:end].equal(item.token_ids[:-1])
        assert whole["labels"][start:end].equal(item.token_ids[1:])
        assert whole["position_ids"][start:end].tolist() == list(range(end - start))
        assert whole["weight_versions"][start:end][whole["loss_mask"][start:end]].equal(item.weight_versions)
        assert whole["sequence_ids"][start:end].eq(number).all()
    assert whole["loss_mask"].sum() == sum(response for _, response in shapes)


def _joined(name: str, parts: list[Microbatch], bounds: list[int]) -> list[torch.Tensor]:
    """The tensor over all ranks in the order of the sequences' tokens."""
    size, joined = len(parts), []
    for start, end in itertools.pairwise(bounds):
        halves = [getattr(part, name)[start // size : end // size].chunk(2) for part in parts]
        joined += [front for front, _ in halves] + [back for _, back in reversed(halves)]
    return joined


def test_minibatches_are_whole_groups_in_the_order_of_their_issue() -> None:
    assert split_groups([7, 7, 3, 3, 3, 9, 9, 4, 4], 2) == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    assert split_groups([5, 6, 5, 6], 1) == [[0, 1, 2, 3]]

"""What rank 0 sampled, and what the last pipeline stage measured, arrives at every rank unchanged."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_a3po.parallel.broadcast import broadcast_trajectories
from megatron_a3po.parallel.reduce import reduce_named
from megatron_a3po.types import FinishReason, Trajectory
from tests.distributed.launch import run_ranks


@pytest.mark.distributed
def test_trajectories_arrive_on_the_other_rank_bit_for_bit() -> None:
    output = run_ranks(_broadcast, 2, timeout_seconds=60)

    assert "compared 4 batches" in output


@pytest.mark.distributed
def test_statistics_of_the_last_stage_are_reduced_over_data_ranks_and_known_to_all() -> None:
    output = run_ranks(_reduce, 4, timeout_seconds=60)

    assert "rank 0 knows" in output


def _trajectories() -> list[Trajectory]:
    shapes = [("spell/7/0", 3, 4), ("日本語 “déjà vu” \n\u2028 \U0001f600", 1, 1), ('"\\', 5, 2)]
    reasons = list(FinishReason)
    return [
        Trajectory(
            prompt_id=prompt_id,
            group_id=2**40 + index,
            token_ids=torch.arange(prompt + response) + 151_000 * index,
            prompt_length=prompt,
            behaviour_logprobs=-torch.rand(response, generator=torch.Generator().manual_seed(index)),
            weight_versions=torch.arange(response) // 2 + 5,
            reward=(0.1, 1 / 3, -1e-300)[index],
            reward_reason=("right", "", "wrong")[index],
            finish_reason=reasons[index],
        )
        for index, (prompt_id, prompt, response) in enumerate(shapes)
    ]


def _broadcast() -> None:
    dist.init_process_group("gloo")
    batches = [_trajectories(), [], _trajectories()[::-1], _trajectories()[:1]]
    for batch in batches:
        received = broadcast_trajectories(batch if dist.get_rank() == 0 else None)
        assert len(received) == len(batch)
        for actual, expected in zip(received, batch, strict=True):
            for field in dataclasses.fields(Trajectory):
                ours, theirs = getattr(actual, field.name), getattr(expected, field.name)
                if isinstance(theirs, torch.Tensor):
                    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), field.name
                else:
                    assert type(ours) is type(theirs) and ours == theirs, field.name
    print(f"compared {len(batches)} batches", flush=True)
    dist.destroy_process_group()


def _reduce() -> None:
    """Two stages of two data-parallel ranks, as Megatron orders them: ranks 2 and 3 are the last stage."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stages: list[Any] = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    pipelines: list[Any] = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    local = None
    if rank >= 2:
        values = {"half": 0.5, "large": 2.0**53, "negative": -float(rank)}
        # In any order; a name that one rank lacks counts as 0 there.
        sums = {name: torch.tensor(values[name], dtype=torch.float64) for name in sorted(values, reverse=rank == 3)}
        if rank == 3:
            sums["once"] = torch.tensor(7.0, dtype=torch.float64)
        local = sums, {"rank": torch.tensor(float(rank), dtype=torch.float64)}
    sums_and_maxima = reduce_named(
        local,
        sums=("once", "large", "negative", "half"),
        maxima=("absent", "rank"),
        data_group=stages[rank // 2],
        pipeline_group=pipelines[rank % 2],
        device=torch.device("cpu"),
    )

    nothing = reduce_named(
        ({}, local[1]) if local is not None else None,
        sums=(),
        maxima=("rank",),
        data_group=stages[rank // 2],
        pipeline_group=pipelines[rank % 2],
        device=torch.device("cpu"),
    )
    assert nothing == ({}, {"rank": 3.0}), nothing
    expected = {"once": 7.0, "large": 2.0**54, "negative": -5.0, "half": 1.0}, {"absent": 0.0, "rank": 3.0}
    assert sums_and_maxima == expected, sums_and_maxima
    print(f"rank {rank} knows", flush=True)
    dist.destroy_process_group()

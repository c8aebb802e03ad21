"""Pack trajectories into microbatches, and split a batch into parts of whole groups."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_a3po.types import Alignment, Microbatch, Trajectory


def split_groups(group_ids: Sequence[int], num_parts: int) -> list[list[int]]:
    """Return the indices of trajectories in `num_parts` parts of equally many whole groups, in issue order."""
    order = list(dict.fromkeys(group_ids))
    part_of = {group: number * num_parts // len(order) for number, group in enumerate(order)}
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index, group in enumerate(group_ids):
        parts[part_of[group]].append(index)
    return parts


def pack(
    trajectories: Sequence[Trajectory], advantages: Tensor, *, alignment: Alignment, device: torch.device
) -> Microbatch:
    """Return this context-parallel rank's part of one microbatch of the trajectories, padded to `alignment`.

    Without trajectories it is all padding, because a rank with less work still takes part in every collective. No other
    place shifts tensors: labels, mask, behaviour log-probs, weight versions and advantages move together by one
    position. The padding at the end is a sequence of its own, because rotary embeddings and attention follow
    `cu_seqlens`. advantages: [trajectories] float32.
    """
    lengths = [alignment.aligned(trajectory.token_ids.numel() - 1) for trajectory in trajectories]
    padding = -sum(lengths) % alignment.total_multiple if trajectories else alignment.total_multiple
    if padding:
        lengths.append(padding)
    bounds = [0, *itertools.accumulate(lengths)]
    total = bounds[-1]

    token_ids = torch.zeros(total, dtype=torch.int64)
    labels = torch.zeros(total, dtype=torch.int64)
    loss_mask = torch.zeros(total, dtype=torch.bool)
    behaviour_logprobs = torch.zeros(total, dtype=torch.float32)
    weight_versions = torch.full((total,), -1, dtype=torch.int64)
    shifted_advantages = torch.zeros(total, dtype=torch.float32)
    for trajectory, start, advantage in zip(
        trajectories, bounds[: len(trajectories)], advantages.tolist(), strict=True
    ):
        end = start + trajectory.token_ids.numel() - 1
        response = slice(end - trajectory.response_length, end)
        token_ids[start:end] = trajectory.token_ids[:-1]
        labels[start:end] = trajectory.token_ids[1:]
        loss_mask[response] = True
        behaviour_logprobs[response] = trajectory.behaviour_logprobs
        weight_versions[response] = trajectory.weight_versions
        shifted_advantages[response] = advantage
    assert bool((weight_versions[loss_mask] >= 0).all()), "every loss token has a weight version"

    mine = _context_parallel_part(lengths, alignment)
    return Microbatch(
        token_ids=token_ids[mine].to(device),
        labels=labels[mine].to(device),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[mine].to(device),
        loss_mask=loss_mask[mine].to(device),
        behaviour_logprobs=behaviour_logprobs[mine].to(device),
        weight_versions=weight_versions[mine].to(device),
        advantages=shifted_advantages[mine].to(device),
        sequence_ids=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[mine].to(device),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32).to(device),
        max_seqlen=max(lengths),
    )


def _context_parallel_part(lengths: Sequence[int], alignment: Alignment) -> Tensor:
    """Return the indices of rank r's tokens: of each sequence's 2c chunks the r-th from the front and the back."""
    size, rank = alignment.context_size, alignment.context_rank
    positions = torch.arange(sum(lengths)).split(list(lengths))
    if size == 1:
        return torch.cat(positions)
    chunks = (sequence.chunk(2 * size) for sequence in positions)
    return torch.cat([part for chunk in chunks for part in (chunk[rank], chunk[2 * size - 1 - rank])])

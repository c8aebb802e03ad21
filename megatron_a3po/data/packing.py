"""From trajectories to packed microbatches of bounded size, the same number on every data-parallel rank."""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_a3po.errors import DataError
from megatron_a3po.types import Microbatch, Trajectory


def assign_microbatches(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> list[list[list[int]]]:
    """Indices of sequences as [rank][microbatch][sequence], balanced, with at most `max_tokens` in each microbatch.

    The number of microbatches is the smallest multiple of `num_ranks` for which placing the sequences, longest first,
    into the emptiest microbatch respects the bound. Raises DataError for a sequence longer than the bound.
    """
    if len(lengths) < num_ranks:
        raise DataError(f"{len(lengths)} sequences cannot feed {num_ranks} data-parallel ranks; raise the batch size")
    if max(lengths) > max_tokens:
        raise DataError(
            f"a sequence of {max(lengths)} tokens does not fit actor.microbatch_tokens = {max_tokens}; raise it to "
            "the longest prompt plus rollout.max_new_tokens"
        )
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    count = -(-sum(lengths) // (max_tokens * num_ranks)) * num_ranks
    while (bins := _place(longest_first, lengths, count, max_tokens)) is None:
        count += num_ranks
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def _place(order: Sequence[int], lengths: Sequence[int], count: int, max_tokens: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for index in order:
        load, number = loads[0]
        if load + lengths[index] > max_tokens:
            return None
        bins[number].append(index)
        heapq.heapreplace(loads, (load + lengths[index], number))
    return bins


def pack(
    trajectories: Sequence[Trajectory], advantages: Tensor, *, multiple_of: int, device: torch.device
) -> Microbatch:
    """One microbatch of these trajectories, padded to a multiple of `multiple_of` tokens (sequence parallelism).

    No trajectory gives a microbatch of padding only: a rank with less work still takes part in every collective.
    advantages [trajectories] float32. This is the only place where tensors are shifted: labels, mask, behaviour
    log-probs, weight versions and advantages move together by one position. The padding is a sequence of its own,
    since rotary embeddings and attention follow `cu_seqlens`.
    """
    lengths = [trajectory.token_ids.numel() - 1 for trajectory in trajectories]
    padding = -sum(lengths) % multiple_of if trajectories else multiple_of
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    total = bounds[-1] + padding

    token_ids = torch.zeros(total, dtype=torch.int64)
    labels = torch.zeros(total, dtype=torch.int64)
    position_ids = torch.zeros(total, dtype=torch.int64)
    loss_mask = torch.zeros(total, dtype=torch.bool)
    behaviour_logprobs = torch.zeros(total, dtype=torch.float32)
    weight_versions = torch.full((total,), -1, dtype=torch.int64)
    shifted_advantages = torch.zeros(total, dtype=torch.float32)
    for trajectory, start, end, advantage in zip(
        trajectories, bounds[:-1], bounds[1:], advantages.tolist(), strict=True
    ):
        response = slice(end - trajectory.response_length, end)
        token_ids[start:end] = trajectory.token_ids[:-1]
        labels[start:end] = trajectory.token_ids[1:]
        position_ids[start:end] = torch.arange(end - start)
        loss_mask[response] = True
        behaviour_logprobs[response] = trajectory.behaviour_logprobs
        weight_versions[response] = trajectory.weight_versions
        shifted_advantages[response] = advantage
    if padding:
        position_ids[-padding:] = torch.arange(padding)
        bounds.append(total)
        lengths.append(padding)
    assert bool((weight_versions[loss_mask] >= 0).all()), "every loss token has a weight version"

    return Microbatch(
        token_ids=token_ids.to(device),
        labels=labels.to(device),
        position_ids=position_ids.to(device),
        loss_mask=loss_mask.to(device),
        behaviour_logprobs=behaviour_logprobs.to(device),
        weight_versions=weight_versions.to(device),
        advantages=shifted_advantages.to(device),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32).to(device),
        max_seqlen=max(lengths),
    )

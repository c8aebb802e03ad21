"""Encode trajectories as a few typed tensors, for files and to send them from rank 0. Nothing is pickled."""

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_a3po.types import FinishReason, Trajectory


class TrajectoryRow(NamedTuple):
    """The values of a trajectory that are not per token."""

    prompt_id: str
    group_id: int
    num_tokens: int
    """of prompt and response"""
    prompt_length: int
    reward: float
    finish_reason: FinishReason
    reward_reason: str = ""


class EncodedTrajectories(NamedTuple):
    """Any number of trajectories, with concatenated tensors."""

    rows: Sequence[TrajectoryRow]
    token_ids: Tensor
    """[all tokens] int64"""
    behaviour_logprobs: Tensor
    """[all response tokens] float32"""
    weight_versions: Tensor
    """[all response tokens] int64"""


def encode_trajectories(trajectories: Sequence[Trajectory]) -> EncodedTrajectories:
    """Concatenate trajectories. The tensors are copied bit for bit."""
    return EncodedTrajectories(
        [
            TrajectoryRow(
                item.prompt_id,
                item.group_id,
                item.token_ids.numel(),
                item.prompt_length,
                item.reward,
                item.finish_reason,
                item.reward_reason,
            )
            for item in trajectories
        ],
        _concatenate([item.token_ids for item in trajectories], torch.int64),
        _concatenate([item.behaviour_logprobs for item in trajectories], torch.float32),
        _concatenate([item.weight_versions for item in trajectories], torch.int64),
    )


def decode_trajectories(encoded: EncodedTrajectories) -> list[Trajectory]:
    """Return the trajectories, as views. Raises ValueError or RuntimeError if lengths do not match."""
    lengths = [row.num_tokens for row in encoded.rows]
    responses = [row.num_tokens - row.prompt_length for row in encoded.rows]
    parts = zip(
        encoded.rows,
        encoded.token_ids.split(lengths),
        encoded.behaviour_logprobs.split(responses),
        encoded.weight_versions.split(responses),
        strict=True,
    )
    return [
        Trajectory(
            prompt_id=row.prompt_id,
            group_id=row.group_id,
            token_ids=token_ids,
            prompt_length=row.prompt_length,
            behaviour_logprobs=behaviour_logprobs,
            weight_versions=weight_versions,
            reward=row.reward,
            finish_reason=FinishReason(row.finish_reason),
            reward_reason=row.reward_reason,
        )
        for row, token_ids, behaviour_logprobs, weight_versions in parts
    ]


def broadcast_trajectories(
    trajectories: Sequence[Trajectory] | None, group: dist.ProcessGroup | None = None
) -> list[Trajectory]:
    """Return rank 0's trajectories on every rank. The other ranks pass None. Collective over `group`.

    Four tensors are sent: a JSON header (UTF-8) with all that is not per token, token ids, behaviour log-probs and
    weight versions.
    """
    sizes = torch.zeros(3, dtype=torch.int64)
    header = token_ids = logprobs = versions = torch.empty(0)
    if trajectories is not None:
        rows, token_ids, logprobs, versions = encode_trajectories(trajectories)
        header = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)
        sizes = torch.tensor([header.numel(), token_ids.numel(), logprobs.numel()])
    dist.broadcast(sizes, src=0, group=group)
    if trajectories is None:
        header = torch.empty(int(sizes[0]), dtype=torch.uint8)
        token_ids = torch.empty(int(sizes[1]), dtype=torch.int64)
        logprobs = torch.empty(int(sizes[2]), dtype=torch.float32)
        versions = torch.empty(int(sizes[2]), dtype=torch.int64)
    for tensor in (header, token_ids, logprobs, versions):
        if tensor.numel():
            dist.broadcast(tensor, src=0, group=group)
    if trajectories is not None:
        return list(trajectories)
    rows = [TrajectoryRow(*row) for row in json.loads(bytes(header.tolist()))]
    return decode_trajectories(EncodedTrajectories(rows, token_ids, logprobs, versions))


def _concatenate(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)

"""Trajectories from rank 0 to every rank, as typed tensors: nothing is pickled."""

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_a3po.types import FinishReason, Trajectory


def broadcast_trajectories(
    trajectories: Sequence[Trajectory] | None, group: dist.ProcessGroup | None = None
) -> list[Trajectory]:
    """The trajectories that rank 0 passes, on every rank; the others pass None. Collective over `group`.

    Four tensors travel: a JSON header (UTF-8) with everything that is not per token, token ids, behaviour log-probs,
    weight versions.
    """
    sizes = torch.zeros(3, dtype=torch.int64)
    header = token_ids = logprobs = versions = torch.empty(0)
    if trajectories is not None:
        header = _encode_header(trajectories)
        token_ids = _concatenate([item.token_ids for item in trajectories], torch.int64)
        logprobs = _concatenate([item.behaviour_logprobs for item in trajectories], torch.float32)
        versions = _concatenate([item.weight_versions for item in trajectories], torch.int64)
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
    return list(trajectories) if trajectories is not None else _decode(header, token_ids, logprobs, versions)


def _concatenate(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)


def _encode_header(trajectories: Sequence[Trajectory]) -> Tensor:
    rows = [
        [item.prompt_id, item.group_id, item.token_ids.numel(), item.prompt_length, item.reward, item.finish_reason]
        for item in trajectories
    ]
    return torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)


def _decode(header: Tensor, token_ids: Tensor, logprobs: Tensor, versions: Tensor) -> list[Trajectory]:
    rows = json.loads(bytes(header.tolist()))
    lengths = [length for _, _, length, _, _, _ in rows]
    responses = [length - prompt_length for _, _, length, prompt_length, _, _ in rows]
    parts = zip(rows, token_ids.split(lengths), logprobs.split(responses), versions.split(responses), strict=True)
    return [
        Trajectory(
            prompt_id=prompt_id,
            group_id=group_id,
            token_ids=ids,
            prompt_length=prompt_length,
            behaviour_logprobs=behaviour_logprobs,
            weight_versions=weight_versions,
            reward=reward,
            finish_reason=FinishReason(finish_reason),
        )
        for (
            prompt_id,
            group_id,
            _,
            prompt_length,
            reward,
            finish_reason,
        ), ids, behaviour_logprobs, weight_versions in parts
    ]

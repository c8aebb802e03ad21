"""Trajectories of two prompt tokens and as many response tokens as there are weight versions."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_a3po.types import FinishReason, Trajectory


def make_trajectory(versions: Sequence[int], group_id: int = 0, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "prompt_id": f"task/0/{group_id}",
        "token_ids": torch.arange(2 + len(versions)),
        "behaviour_logprobs": torch.zeros(len(versions)),
        "weight_versions": torch.tensor(versions, dtype=torch.int64),
        "reward": 0.0,
        "finish_reason": FinishReason.STOP,
    }
    return Trajectory(group_id=group_id, prompt_length=2, **values | changes)

"""The training side: Megatron-Core models, built by megatron-bridge and trained on vocab-parallel log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_a3po.config import RunConfig
from megatron_a3po.runtime.timing import PhaseTimer

if TYPE_CHECKING:
    from megatron_a3po.actor.actor import PolicyActor


def build_actor(config: RunConfig, *, device: torch.device, timer: PhaseTimer) -> PolicyActor:
    """Build this rank's actor. Collective over all ranks; the default process group must exist."""
    if config.device == "cpu":
        from megatron_a3po import cpu

        cpu.install()
    # Import this last: Megatron decides at its import which device and which modules exist.
    from megatron_a3po.actor.actor import PolicyActor

    return PolicyActor(config, device=device, timer=timer)

"""The training side: Megatron-Core models, built by megatron-bridge, trained on vocab-parallel log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_a3po.config import RunConfig
from megatron_a3po.runtime.timing import PhaseTimer

if TYPE_CHECKING:
    from megatron_a3po.actor.actor import PolicyActor


def build_actor(config: RunConfig, *, device: torch.device, timer: PhaseTimer) -> PolicyActor:
    """This rank's actor. Collective; the default process group must exist."""
    if config.device == "cpu":
        from megatron_a3po import cpu

        cpu.install()
    # Megatron decides when it is imported which device and which modules there are, so not before that.
    from megatron_a3po.actor.actor import PolicyActor

    return PolicyActor(config, device=device, timer=timer)

"""What travels between the parts, in one layout only (packed, never padded), and names that several parts share."""

import math
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One sampled response with everything its rollout server knew about it. Held by every rank, on the CPU."""

    prompt_id: str
    group_id: int
    """Issue number of the group; the responses to one prompt share it."""
    token_ids: Tensor
    """[prompt + response] int64"""
    prompt_length: int
    behaviour_logprobs: Tensor
    """[response] float32, at sampling temperature, as the server reported them"""
    weight_versions: Tensor
    """[response] int64; changes inside a response when weights were published meanwhile"""
    reward: float
    """NaN where none was asked for"""
    finish_reason: FinishReason
    reward_reason: str = ""
    """Why it got this reward, in one word, where the scorer tells"""

    def __post_init__(self) -> None:
        """Raises ValueError where the lengths do not belong together; nothing is broadcast or cut later."""
        lengths = self.behaviour_logprobs.shape, self.weight_versions.shape
        if self.prompt_length < 1 or lengths != ((self.response_length,), (self.response_length,)):
            raise ValueError(
                f"trajectory {self.prompt_id}: {self.token_ids.numel()} tokens, a prompt of {self.prompt_length}, but "
                f"log-probs {tuple(lengths[0])} and weight versions {tuple(lengths[1])}"
            )

    @property
    def response_length(self) -> int:
        return self.token_ids.numel() - self.prompt_length


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryGroup:
    """The responses to one prompt, which share a baseline."""

    group_id: int
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Packed sequences, shifted so that position t predicts `labels[t]`. All [tokens], on the rank's device.

    Under context parallelism `tokens` are this rank's: of the 2c equal chunks of every sequence, rank r of c has r and
    2c - 1 - r, so that causal attention costs each rank the same. Padding has an all-false mask: behind each sequence,
    up to whole chunks, and as a last sequence of its own.
    """

    token_ids: Tensor
    """int64"""
    labels: Tensor
    """int64, the next token"""
    position_ids: Tensor
    """int64, from 0 in every sequence"""
    loss_mask: Tensor
    """bool, true where the label is a response token"""
    behaviour_logprobs: Tensor
    """float32, of the label; undefined where the mask is false"""
    weight_versions: Tensor
    """int64, of the label; -1 where the mask is false"""
    advantages: Tensor
    """float32, of the label; 0 where the mask is false"""
    sequence_ids: Tensor
    """int64, the number of the token's sequence in the pack"""
    cu_seqlens: Tensor
    """[sequences + 1] int32, bounds of the whole sequences with their padding, over all context-parallel ranks"""
    max_seqlen: int
    recomputed_logprobs: Tensor | None = None
    """float32, of the policy at the start of the step by a forward pass of its own; last pipeline stage only"""
    reference_logprobs: Tensor | None = None
    """float32, of the frozen reference policy; last pipeline stage only"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """What the parallel layout asks of the token counts of a microbatch, and which part of it is this rank's."""

    context_size: int = 1
    context_rank: int = 0
    rank_multiple: int = 1
    """The tokens of a microbatch on one rank must be a multiple of this."""

    @property
    def sequence_multiple(self) -> int:
        """The length of every sequence must be a multiple of this."""
        return 2 * self.context_size if self.context_size > 1 else 1

    @property
    def total_multiple(self) -> int:
        """The tokens of a microbatch over all context-parallel ranks must be a multiple of this."""
        return math.lcm(self.sequence_multiple, self.context_size * self.rank_multiple)

    def aligned(self, length: int) -> int:
        return -(-length // self.sequence_multiple) * self.sequence_multiple


def update_group_name(run_id: str, number: int) -> str:
    """Name of a weight-update group at the servers. A name cannot be used twice in one process, nor by two runs."""
    return f"megatron_a3po_{run_id}_{number}"

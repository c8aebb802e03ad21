"""Types and names that several parts share. Tensors have one layout: packed, never padded."""

import math
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class FinishReason(StrEnum):
    """Why a rollout server ended a response."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One sampled response with all that its rollout server reported. Every rank holds it, on the CPU."""

    prompt_id: str
    group_id: int
    """Issue number of the group, which the responses to one prompt share"""
    token_ids: Tensor
    """[prompt + response] int64"""
    prompt_length: int
    behaviour_logprobs: Tensor
    """[response] float32, at sampling temperature, as the server reported them"""
    weight_versions: Tensor
    """[response] int64; changes inside a response when weights were published meanwhile"""
    reward: float
    """NaN if no reward was asked for"""
    finish_reason: FinishReason
    reward_reason: str = ""
    """The scorer's reason for this reward in one word, if it gives one"""

    def __post_init__(self) -> None:
        """Raise ValueError if the lengths do not match: nothing is broadcast or cut later."""
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

    Under context parallelism, `tokens` are those of this rank. Every sequence has 2c equal chunks, and rank r of c
    holds chunks r and 2c - 1 - r, so that causal attention costs the same on each rank. Padding stands behind each
    sequence, up to whole chunks, and as a last sequence of its own. Its mask is false.
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
    """float32, by a forward pass of the policy before the step; only on the last pipeline stage"""
    reference_logprobs: Tensor | None = None
    """float32, of the frozen reference policy; only on the last pipeline stage"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """The multiples that the parallel layout needs in a microbatch, and the part of it that this rank holds."""

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
        """Return the length of a sequence with its padding."""
        return -(-length // self.sequence_multiple) * self.sequence_multiple


def update_group_name(run_id: str, number: int) -> str:
    """Name of a weight-update group at the servers. A name cannot be used twice in one process, nor by two runs."""
    return f"megatron_a3po_{run_id}_{number}"

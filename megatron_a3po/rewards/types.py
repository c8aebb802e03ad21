"""What a reward is computed from, and what a reward function may return."""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

REASON = re.compile(r"[a-z0-9_]{1,40}")
"""Reasons become names of metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response, as a reward function receives it."""

    prompt_id: str
    prompt: str
    """The question, without system prompt and chat template"""
    response: str
    answer: Any
    """The right answer according to the dataset; None where the dataset has no such column"""
    row: dict[str, Any]
    """The other columns that `data.columns` names, or the whole entry of a reasoning-gym task"""
    num_tokens: int
    """Length of the response"""
    truncated: bool
    """Whether the response was cut off at `rollout.max_new_tokens`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A reward function's result for one response."""

    value: float
    reason: str = ""
    """Why, in one word; the share of each reason is a metric (`reward_reason/...`)"""
    has_format: bool = True
    """Whether the response matches `reward.format_pattern`"""


class FailureKind(StrEnum):
    """Why a group has no reward; one of the ledger's reasons."""

    TIMEOUT = "reward_timeout"
    ERROR = "reward_error"
    """The function raised."""
    MEMORY = "reward_memory"
    """The function needed more than `reward.worker_memory_bytes`."""
    DIED = "reward_worker_died"
    INVALID = "reward_invalid"
    """The function returned something that is not a reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFailure:
    """The outcome of a group that could not be scored. Its responses are neither right nor wrong."""

    kind: FailureKind
    message: str


class InvalidReward(ValueError):
    """A reward function returned something that is not a reward."""


def to_score(result: Any) -> Score:
    """Convert what a reward function returned: a number, or a tuple of a number and a reason. Raises InvalidReward."""
    value, reason = result if isinstance(result, tuple) and len(result) == 2 else (result, "")
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidReward(f"{result!r:.200} is not a reward; return a finite number, or a tuple of it and a reason")
    if not isinstance(reason, str) or (reason and not REASON.fullmatch(reason)):
        raise InvalidReward(f"{reason!r:.200} is not a reason; use up to 40 letters a-z, digits and underscores")
    return Score(value=number, reason=reason)

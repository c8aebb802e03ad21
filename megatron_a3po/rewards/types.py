"""What a reward is computed from, and what may come of it."""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

REASON = re.compile(r"[a-z0-9_]{1,40}")
"""Reasons become names of metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response, as a reward function is given it."""

    prompt_id: str
    prompt: str
    """The question, without system prompt and chat template"""
    response: str
    answer: Any
    """What the dataset says is right; None where it has no such column"""
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
    """Why, in one word; shares of each are metrics (`reward_reason/...`)"""
    has_format: bool = True
    """Whether the response matches `reward.format_pattern`"""


class FailureKind(StrEnum):
    """Why there is no reward; a reason of the ledger."""

    TIMEOUT = "reward_timeout"
    ERROR = "reward_error"
    """The function raised."""
    MEMORY = "reward_memory"
    """It needed more than `reward.worker_memory_bytes`."""
    DIED = "reward_worker_died"
    INVALID = "reward_invalid"
    """It returned what is no reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFailure:
    """A group without rewards: neither right nor wrong."""

    kind: FailureKind
    message: str


class InvalidReward(ValueError):
    """A reward function returned what is no finite number."""


def to_score(result: Any) -> Score:
    """A number, or a number and a reason, as a reward function returned it. Raises InvalidReward."""
    value, reason = result if isinstance(result, tuple) and len(result) == 2 else (result, "")
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidReward(f"{result!r:.200} is no reward; return a finite number, or a tuple of it and a reason")
    if not isinstance(reason, str) or (reason and not REASON.fullmatch(reason)):
        raise InvalidReward(f"{reason!r:.200} is no reason; use up to 40 letters a-z, digits and underscores")
    return Score(value=number, reason=reason)

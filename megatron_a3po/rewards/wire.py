"""What the trainer and a worker say to each other, over pipes between two processes of one machine.

Requests are pickled: through JSON tuples become lists, and then reasoning-gym's arc_agi and rearc grade right answers
as wrong. They come from the trainer, whose child the worker is. Answers are JSON, so that nothing that a reward
function does to its own process is executed in the trainer.
"""

import struct
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from megatron_a3po.rewards.scorers import ScorerSpec
from megatron_a3po.rewards.types import FailureKind, RewardFailure, Score

_HEADER = struct.Struct("!Q")
HEADER_BYTES = _HEADER.size
MAX_ANSWER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStart:
    """The first request. All others are lists of groups, each a list of samples."""

    spec: ScorerSpec
    memory_bytes: int | None
    python_path: list[str]


class Ready(BaseModel):
    """The first answer: whether the worker can score."""

    model_config = ConfigDict(extra="forbid")
    error: str | None


class Answer(BaseModel):
    """For one group: scores, or a failure; one that `ends` is the worker's last."""

    model_config = ConfigDict(extra="forbid")
    scores: list[tuple[float, str, bool]] | None = None
    failure: tuple[FailureKind, str] | None = None
    ends: Literal[True] | None = None

    def outcome(self) -> list[Score] | RewardFailure:
        if self.failure is not None:
            return RewardFailure(kind=self.failure[0], message=self.failure[1])
        return [Score(value=value, reason=reason, has_format=ok) for value, reason, ok in self.scores or []]


def frame(content: bytes) -> bytes:
    """`content` behind its length."""
    return _HEADER.pack(len(content)) + content


def length_of(header: bytes) -> int:
    return int(_HEADER.unpack(header)[0])

"""Give sampled responses their rewards, and decide when too many responses get none."""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from typing import Protocol

from megatron_a3po.errors import RewardError
from megatron_a3po.rewards.types import RewardFailure, Sample, Score
from megatron_a3po.rollout.sampler import Responses
from megatron_a3po.runtime.logging import logger
from megatron_a3po.types import FinishReason, Trajectory, TrajectoryGroup

_WINDOW = 100
"""`reward.max_failed_share` is a share of this many groups."""
_BAD_FORMAT = "bad_format"
_CHUNK = 32
"""How many prompts of an evaluation one request to a worker has."""


class Workers(Protocol):
    """The part of `RewardWorkers` that scores."""

    async def score(self, groups: Sequence[Sequence[Sample]]) -> Sequence[list[Score] | RewardFailure]:
        """Return the scores of each group, or why it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaping:
    """Penalties that training, but no evaluation, subtracts from a score."""

    max_new_tokens: int
    format_penalty: float = 0.0
    length_penalty: float = 0.0
    """For a response of `max_new_tokens`; shorter ones pay in proportion"""

    def reward(self, score: Score, num_tokens: int) -> float:
        """Return the reward of a response of `num_tokens`."""
        format_penalty = 0.0 if score.has_format else self.format_penalty
        return score.value - format_penalty - self.length_penalty * num_tokens / self.max_new_tokens


class Rewarder:
    """Ask the reward workers for scores, and turn scores into rewards."""

    def __init__(self, workers: Workers, shaping: Shaping, *, max_failed_share: float) -> None:
        """max_failed_share: how many of the prompts of an evaluation may go without a reward."""
        self._workers = workers
        self._shaping = shaping
        self._max_failed_share = max_failed_share

    async def reward_group(self, responses: Responses) -> TrajectoryGroup | RewardFailure:
        """Return the group to train on, with shaped rewards.

        If one response has no reward, the whole group has none: it would be missing from the baseline of the others.
        """
        (outcome,) = await self._workers.score([_samples(responses)])
        if isinstance(outcome, RewardFailure):
            return _of_prompt(outcome, responses)
        rewards = [
            self._shaping.reward(score, trajectory.response_length)
            for trajectory, score in zip(responses.trajectories, outcome, strict=True)
        ]
        return TrajectoryGroup(group_id=responses.group_id, trajectories=_rewarded(responses, outcome, rewards))

    async def score_each(self, responses: Sequence[Responses]) -> list[Responses]:
        """Return the responses of an evaluation with the scorer's values as rewards, without prompts that have none.

        Raises RewardError if the scorer failed for all prompts, or for more than `max_failed_share` of them. The share
        is of at least 100 prompts, as in training.
        """
        chunks = batched([_samples(item) for item in responses], _CHUNK)
        outcomes = [outcome for chunk in await asyncio.gather(*map(self._workers.score, chunks)) for outcome in chunk]
        scored: list[Responses] = []
        failed: list[RewardFailure] = []
        for item, outcome in zip(responses, outcomes, strict=True):
            if isinstance(outcome, RewardFailure):
                failed.append(_of_prompt(outcome, item))
            else:
                values = [score.value for score in outcome]
                scored.append(replace(item, trajectories=_rewarded(item, outcome, values)))
        if failed and (len(failed) > self._max_failed_share * max(_WINDOW, len(responses)) or not scored):
            raise RewardError(_too_many(failed, f"{len(responses)} prompts of an evaluation", self._max_failed_share))
        if failed:
            logger.warning(
                "%d of %d prompts of an evaluation got no reward; the last one: %s",
                *(len(failed), len(responses), failed[-1].message),
            )
        return scored


class FailureWatch:
    """Count the failures among the last 100 groups.

    Groups that are still to come count as successes, so that the first failure of a run does not end it.
    """

    def __init__(self, max_failed_share: float) -> None:
        self._max_failed_share = max_failed_share
        self._recent: deque[RewardFailure | None] = deque(maxlen=_WINDOW)

    def record(self, failure: RewardFailure | None) -> None:
        """Count a group that has its rewards (None) or goes without. Raises RewardError if too many go without."""
        self._recent.append(failure)
        if failure is None:
            return
        logger.warning("a group is dropped (%s): %s", failure.kind, failure.message)
        failed = [seen for seen in self._recent if seen is not None]
        if len(failed) > self._max_failed_share * _WINDOW:
            raise RewardError(_too_many(failed, f"the last {_WINDOW} groups", self._max_failed_share))


def _too_many(failed: list[RewardFailure], of_what: str, max_failed_share: float) -> str:
    counts = ", ".join(f"{number} {kind}" for kind, number in Counter(failure.kind for failure in failed).most_common())
    return (
        f"{len(failed)} of {of_what} got no reward ({counts}), over reward.max_failed_share = {max_failed_share:g}; "
        f"the last one: {failed[-1].message}; repair the reward function, or raise reward.max_failed_share"
    )


def _of_prompt(failure: RewardFailure, responses: Responses) -> RewardFailure:
    return replace(failure, message=f"prompt {responses.prompt.prompt_id}: {failure.message}")


def _rewarded(responses: Responses, scores: Iterable[Score], rewards: Iterable[float]) -> tuple[Trajectory, ...]:
    return tuple(
        replace(trajectory, reward=reward, reward_reason=_reason(score))
        for trajectory, score, reward in zip(responses.trajectories, scores, rewards, strict=True)
    )


def _samples(responses: Responses) -> list[Sample]:
    prompt = responses.prompt
    return [
        Sample(
            prompt_id=prompt.prompt_id,
            prompt=prompt.question,
            response=text,
            answer=prompt.answer,
            row=dict(prompt.row),
            num_tokens=trajectory.response_length,
            truncated=trajectory.finish_reason is FinishReason.LENGTH,
        )
        for trajectory, text in zip(responses.trajectories, responses.texts, strict=True)
    ]


def _reason(score: Score) -> str:
    if score.has_format:
        return score.reason
    return f"{score.reason}_{_BAD_FORMAT}" if score.reason else _BAD_FORMAT

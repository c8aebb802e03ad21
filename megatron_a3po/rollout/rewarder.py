"""From responses to rewarded trajectories."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import batched
from typing import Protocol

from megatron_a3po.errors import RewardError
from megatron_a3po.rewards.types import RewardFailure, Sample, Score
from megatron_a3po.rollout.reward_failures import WINDOW, too_many
from megatron_a3po.rollout.sampler import Responses
from megatron_a3po.rollout.shaping import Shaping
from megatron_a3po.runtime.logging import logger
from megatron_a3po.types import FinishReason, TrajectoryGroup

_BAD_FORMAT = "bad_format"
_CHUNK = 32
"""Prompts of an evaluation whose responses one worker is given at a time."""


class ScorerPool(Protocol):
    async def score(self, groups: Sequence[Sequence[Sample]]) -> Sequence[list[Score] | RewardFailure]:
        """Scores of each group, or why it has none."""


class Rewarder:
    """Asks the reward workers, and shapes what they say."""

    def __init__(self, pool: ScorerPool, shaping: Shaping, *, max_failed_share: float) -> None:
        self._pool = pool
        self._shaping = shaping
        self._max_failed_share = max_failed_share

    async def reward_group(self, responses: Responses) -> TrajectoryGroup | RewardFailure:
        """The group to train on. One response without a reward is a group without rewards: its others would be
        compared with a baseline that it is missing from."""
        (outcome,) = await self._pool.score([_samples(responses)])
        if isinstance(outcome, RewardFailure):
            return replace(outcome, message=f"prompt {responses.prompt.prompt_id}: {outcome.message}")
        return TrajectoryGroup(
            group_id=responses.group_id,
            trajectories=tuple(
                replace(
                    trajectory,
                    reward=self._shaping.reward(score, trajectory.response_length),
                    reward_reason=_reason(score),
                )
                for trajectory, score in zip(responses.trajectories, outcome, strict=True)
            ),
        )

    async def score_each(self, responses: Sequence[Responses]) -> list[Responses]:
        """Responses of an evaluation, with rewards as the scorer gives them; prompts that it fails for are left out.

        Raises RewardError when these are more than `max_failed_share`, or all. As in training, fewer than 100 prompts
        may miss as many as 100 may.
        """
        chunks = batched([_samples(item) for item in responses], _CHUNK)
        outcomes = [outcome for chunk in await asyncio.gather(*map(self._pool.score, chunks)) for outcome in chunk]
        scored: list[Responses] = []
        failed: list[RewardFailure] = []
        for item, outcome in zip(responses, outcomes, strict=True):
            if isinstance(outcome, RewardFailure):
                failed.append(replace(outcome, message=f"prompt {item.prompt.prompt_id}: {outcome.message}"))
                continue
            rewarded = (
                replace(trajectory, reward=score.value, reward_reason=_reason(score))
                for trajectory, score in zip(item.trajectories, outcome, strict=True)
            )
            scored.append(replace(item, trajectories=tuple(rewarded)))
        if failed:
            message = too_many(failed, f"{len(responses)} prompts of an evaluation", self._max_failed_share)
            if len(failed) > self._max_failed_share * max(WINDOW, len(responses)) or not scored:
                raise RewardError(message)
            logger.warning(
                "%d of %d prompts of an evaluation got no reward; the last one: %s",
                *(len(failed), len(responses), failed[-1].message),
            )
        return scored


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

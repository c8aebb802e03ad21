"""From prompts to responses."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_a3po.data.prompts import Prompt
from megatron_a3po.errors import RolloutError
from megatron_a3po.rollout.continuation import Continuation
from megatron_a3po.rollout.pool import ServerPool
from megatron_a3po.rollout.protocol import GenerateResponse, generate_request, to_trajectory
from megatron_a3po.runtime.logging import logger
from megatron_a3po.types import Trajectory

URGENT = 1 << 40
"""Priority of evaluation and checks, which the trainer waits for, over every group's `-group_id`."""
_CHUNK = 64
"""Prompts per request of an evaluation: large enough for one round trip to cost nothing, small enough to spread."""
_ATTEMPTS = 3


class Decoder(Protocol):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Responses:
    """What servers answered to one prompt."""

    prompt: Prompt
    group_id: int
    """-1: of an evaluation"""
    trajectories: tuple[Trajectory, ...]
    """Without rewards, which are NaN"""
    texts: tuple[str, ...]
    """Of each trajectory's response"""


class Sampler:
    """Samples responses at one temperature."""

    def __init__(
        self, pool: ServerPool, tokenizer: Decoder, *, group_size: int, max_new_tokens: int, temperature: float
    ) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._group_size = group_size
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature

    async def sample_group(self, prompt: Prompt, group_id: int) -> Responses:
        """All responses of one group in one request."""
        responses = await self._generate([prompt], self._group_size, priority=-group_id)
        return self._responses(prompt, group_id, responses)

    async def sample_each(self, prompts: Sequence[Prompt], max_new_tokens: int | None = None) -> list[Responses]:
        """One response per prompt, of at most `max_new_tokens` if given, before everything else that waits."""
        chunks = [prompts[start : start + _CHUNK] for start in range(0, len(prompts), _CHUNK)]
        answers = await asyncio.gather(
            *(self._generate(chunk, 1, priority=URGENT, max_new_tokens=max_new_tokens) for chunk in chunks)
        )
        responses = [response for answer in answers for response in answer]
        return [self._responses(prompt, -1, [response]) for prompt, response in zip(prompts, responses, strict=True)]

    async def _generate(
        self, prompts: Sequence[Prompt], num_samples: int, *, priority: int, max_new_tokens: int | None = None
    ) -> list[GenerateResponse]:
        """`num_samples` responses to one prompt, or one to each of several. Those that are aborted go on from the
        tokens that they have: half a response is neither right nor wrong."""
        token_ids = [list(prompt.token_ids) for prompt in prompts]
        limit = max_new_tokens or self._max_new_tokens
        whole = generate_request(
            token_ids if len(prompts) > 1 else token_ids[0],
            num_samples=num_samples,
            max_new_tokens=limit,
            temperature=self._temperature,
            priority=priority,
        )
        name = f"prompt {prompts[0].prompt_id}"
        sampled = Continuation([ids for ids in token_ids for _ in range(num_samples)], limit)
        attempts = 0
        while attempts < _ATTEMPTS:
            num_pauses = self._pool.num_pauses
            parts = await self._pool.generate(sampled.request(whole))
            if len(parts) != sampled.num_open:
                raise RolloutError(f"{name}: {len(parts)} of {sampled.num_open} responses")
            if (reason := sampled.add(parts)) is None:
                return sampled.responses
            if self._pool.pause_mode != "abort" or num_pauses == self._pool.num_pauses:
                attempts += 1
                logger.warning("%s was aborted (%s); it goes on where it was", name, reason)
        raise RolloutError(f"{name}: the server aborted it {_ATTEMPTS} times; see the server's log")

    def _responses(self, prompt: Prompt, group_id: int, responses: Sequence[GenerateResponse]) -> Responses:
        return Responses(
            prompt=prompt,
            group_id=group_id,
            trajectories=tuple(
                to_trajectory(
                    response,
                    prompt_id=prompt.prompt_id,
                    group_id=group_id,
                    prompt_ids=prompt.token_ids,
                    reward=math.nan,
                )
                for response in responses
            ),
            texts=tuple(
                self._tokenizer.decode(response.output_ids, skip_special_tokens=True) for response in responses
            ),
        )

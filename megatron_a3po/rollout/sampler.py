"""From prompts to responses."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import batched, cycle, islice
from typing import Protocol

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.membership import Server
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import GenerateResponse, generate_request, to_trajectory
from megatron_a3po.prompts.prompts import Prompt
from megatron_a3po.rollout.continuation import Continuation
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How responses are sampled."""

    num_samples: int
    """Per prompt"""
    max_new_tokens: int
    temperature: float


class Sampler:
    """Samples responses."""

    def __init__(
        self,
        pool: ServerPool,
        tokenizer: Decoder,
        sampling: Sampling,
        *,
        max_in_flight: int,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`sampling`: for groups. max_in_flight: responses that an evaluation asks for at one time, since what waits
        long in a server's queue is given to another one. stop_token_ids: at which servers end a response."""
        self._stop_token_ids = stop_token_ids
        self._pool = pool
        self._tokenizer = tokenizer
        self.sampling = sampling
        self._max_in_flight = max_in_flight

    async def sample_group(self, prompt: Prompt, group_id: int) -> Responses:
        """All responses of one group in one request."""
        responses = await self._generate([prompt], self.sampling, priority=-group_id)
        return self._responses(prompt, group_id, responses)

    async def sample_each(
        self, prompts: Sequence[Prompt], sampling: Sampling, done: Callable[[int], None] = lambda number: None
    ) -> list[Responses]:
        """Responses to every prompt, before everything else that waits. `done` hears of so many more responses."""
        # Several prompts in one request, or several responses to one.
        chunks = list(batched(prompts, _CHUNK if sampling.num_samples == 1 else 1))
        size = max((len(chunk) for chunk in chunks), default=1) * sampling.num_samples
        slots = asyncio.Semaphore(max(1, self._max_in_flight // size))

        async def ask(chunk: Sequence[Prompt]) -> list[GenerateResponse]:
            async with slots:
                responses = await self._generate(chunk, sampling, priority=URGENT)
            done(len(responses))
            return responses

        answers = await asyncio.gather(*map(ask, chunks))
        responses = batched((response for answer in answers for response in answer), sampling.num_samples)
        return [self._responses(prompt, -1, item) for prompt, item in zip(prompts, responses, strict=True)]

    async def sample_everywhere(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Responses]:
        """Of every server a response to one prompt at least, before everything else that waits. The prompts are dealt
        to the servers in turn, from the first one again where they are fewer."""
        if not prompts:
            return []
        sampling = replace(self.sampling, num_samples=1, max_new_tokens=max_new_tokens)
        servers: list[Server | None] = [*self._pool.states.members] or [None]
        dealt = list(islice(cycle(prompts), max(len(prompts), len(servers))))
        hands = [dealt[number :: len(servers)] for number in range(len(servers))]
        asked = zip(hands, servers, strict=True)
        answers = await asyncio.gather(
            *(self._generate(hand, sampling, priority=URGENT, server=server) for hand, server in asked)
        )
        return [
            self._responses(prompt, -1, [response])
            for hand, answer in zip(hands, answers, strict=True)
            for prompt, response in zip(hand, answer, strict=True)
        ]

    async def _generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, priority: int, server: Server | None = None
    ) -> list[GenerateResponse]:
        """Several responses to one prompt, or one to each of several. Those that are aborted go on from the tokens that
        they have: half a response is neither right nor wrong."""
        token_ids = [list(prompt.token_ids) for prompt in prompts]
        whole = generate_request(
            token_ids if len(prompts) > 1 else token_ids[0],
            num_samples=sampling.num_samples,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            priority=priority,
        )
        name = f"prompt {prompts[0].prompt_id}"
        repeated = [ids for ids in token_ids for _ in range(sampling.num_samples)]
        sampled = Continuation(repeated, sampling.max_new_tokens, self._stop_token_ids)
        attempts = 0
        while attempts < _ATTEMPTS:
            num_pauses = self._pool.num_pauses
            parts = await self._pool.generate(sampled.request(whole), server)
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

"""Sample responses to prompts, and continue those that a server has aborted."""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import batched, cycle, islice
from pathlib import Path
from typing import Any, Protocol

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.membership import Server
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import (
    FinishReasonInfo,
    GenerateResponse,
    MetaInfo,
    VersionSpan,
    generate_request,
    to_trajectory,
)
from megatron_a3po.prompts.prompts import Prompt
from megatron_a3po.runtime.logging import logger
from megatron_a3po.types import FinishReason, Trajectory

URGENT = 1 << 40
"""Priority of evaluations and checks, which the trainer waits for. A group has the priority `-group_id`."""
_CHUNK = 64
"""Prompts per request of an evaluation: enough to make round trips cheap, few enough to spread over servers."""
_ATTEMPTS = 3


class Decoder(Protocol):
    """The part of a Hugging Face tokenizer that responses need."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Responses:
    """All sampled responses to one prompt."""

    prompt: Prompt
    group_id: int
    """-1 in an evaluation"""
    trajectories: tuple[Trajectory, ...]
    """Before scoring, every reward is NaN."""
    texts: tuple[str, ...]
    """The text of each response"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How responses are sampled."""

    num_samples: int
    """Per prompt"""
    max_new_tokens: int
    temperature: float


class Sampler:
    """Sample responses from the rollout servers."""

    def __init__(
        self,
        pool: ServerPool,
        tokenizer: Decoder,
        sampling: Sampling,
        *,
        max_in_flight: int,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Sample groups with `sampling`.

        max_in_flight: how many responses an evaluation requests at a time. A request that waits long in a server's
        queue would be given to another server. stop_token_ids: tokens at which servers end a response.
        """
        self._stop_token_ids = stop_token_ids
        self._pool = pool
        self._tokenizer = tokenizer
        self.sampling = sampling
        self._max_in_flight = max_in_flight

    async def sample_group(self, prompt: Prompt, group_id: int) -> Responses:
        """Sample all responses of one group in one request. Raises RolloutError."""
        responses = await self._generate([prompt], self.sampling, priority=-group_id)
        return self._responses(prompt, group_id, responses)

    async def sample_each(
        self, prompts: Sequence[Prompt], sampling: Sampling, done: Callable[[int], None] = lambda number: None
    ) -> list[Responses]:
        """Sample responses to every prompt, ahead of training. `done` is called with the number of new responses."""
        # A request has several prompts, or several responses to one prompt.
        chunks = list(batched(prompts, _CHUNK if sampling.num_samples == 1 else 1))
        size = max((len(chunk) for chunk in chunks), default=1) * sampling.num_samples
        slots = asyncio.Semaphore(max(1, self._max_in_flight // size))

        async def request(chunk: Sequence[Prompt]) -> list[GenerateResponse]:
            async with slots:
                responses = await self._generate(chunk, sampling, priority=URGENT)
            done(len(responses))
            return responses

        answers = await asyncio.gather(*map(request, chunks))
        responses = batched((response for answer in answers for response in answer), sampling.num_samples)
        return [self._responses(prompt, -1, item) for prompt, item in zip(prompts, responses, strict=True)]

    async def sample_everywhere(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Responses]:
        """Sample at least one response from every server, ahead of training.

        Servers get the prompts in turn. If there are fewer prompts than servers, prompts are used again.
        """
        if not prompts:
            return []
        sampling = replace(self.sampling, num_samples=1, max_new_tokens=max_new_tokens)
        servers: list[Server | None] = [*self._pool.membership.members] or [None]
        dealt = list(islice(cycle(prompts), max(len(prompts), len(servers))))
        hands = [dealt[number :: len(servers)] for number in range(len(servers))]
        requests = zip(hands, servers, strict=True)
        answers = await asyncio.gather(
            *(self._generate(hand, sampling, priority=URGENT, server=server) for hand, server in requests)
        )
        return [
            self._responses(prompt, -1, [response])
            for hand, answer in zip(hands, answers, strict=True)
            for prompt, response in zip(hand, answer, strict=True)
        ]

    async def _generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, priority: int, server: Server | None = None
    ) -> list[GenerateResponse]:
        """Sample several responses to one prompt, or one response to each of several prompts.

        A response that was aborted continues from the tokens that it has, because half a response is neither right nor
        wrong.
        """
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
        sampled = _Continuation(repeated, sampling.max_new_tokens, self._stop_token_ids)
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
                logger.warning("%s was aborted (%s) and continues from its last token", name, reason)
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


class _Continuation:
    """The responses to one request, each joined from its parts: a pause or a lack of memory aborts responses."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: frozenset[int] = frozenset()
    ) -> None:
        """prompts: token ids of one prompt for each response. stop_token_ids: tokens that complete a response."""
        self._prompts = prompts
        self._max_new_tokens = max_new_tokens
        self._stop_token_ids = stop_token_ids
        self.responses: list[GenerateResponse] = []
        self._open = list(range(len(prompts)))

    @property
    def num_open(self) -> int:
        """How many responses are not complete."""
        return len(self._open)

    def add(self, parts: Sequence[GenerateResponse]) -> str | None:
        """Add the parts of the open responses, in order. Return why one is still open, or None if none is."""
        if not self.responses:
            self.responses = list(parts)
        else:
            for number, part in zip(self._open, parts, strict=True):
                self.responses[number] = _join(self.responses[number], part)
        aborted = [number for number in self._open if _is_aborted(self.responses[number])]
        reason = self.responses[aborted[0]].meta_info.finish_reason.message if aborted else None
        self._open = []
        for number in aborted:
            if (end := self._end(number)) is not None:
                last = GenerateResponse(meta_info=MetaInfo(finish_reason=FinishReasonInfo(type=end)))
                self.responses[number] = _join(self.responses[number], last)
            else:
                self._open.append(number)
        return (reason or "no reason given") if self._open else None

    def request(self, first: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the next request: `first` at the start, later one for the missing tokens only."""
        if not self.responses:
            return first
        sampling = first["sampling_params"] | {"n": 1}
        return first | {
            "input_ids": [[*self._prompts[number], *self.responses[number].output_ids] for number in self._open],
            "sampling_params": [sampling | {"max_new_tokens": self._left(number)} for number in self._open],
        }

    def _end(self, number: int) -> FinishReason | None:
        """Return how an aborted response ended, if it is complete: SGLang checks for an abort before the last token."""
        if self._stop_token_ids.intersection(self.responses[number].output_ids[-1:]):
            return FinishReason.STOP
        return FinishReason.LENGTH if self._left(number) == 0 else None

    def _left(self, number: int) -> int:
        return self._max_new_tokens - len(self.responses[number].output_ids)


def _join(first: GenerateResponse, second: GenerateResponse) -> GenerateResponse:
    """Join two parts of a response, with the log-probs and the weight versions of both."""
    start = len(first.output_ids)
    moved = [
        VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
        for span in second.meta_info.weight_versions
    ]
    return GenerateResponse(
        output_ids=first.output_ids + second.output_ids,
        meta_info=MetaInfo(
            finish_reason=second.meta_info.finish_reason,
            output_token_logprobs=first.meta_info.output_token_logprobs + second.meta_info.output_token_logprobs,
            weight_versions=first.meta_info.weight_versions + moved,
        ),
    )


def _is_aborted(response: GenerateResponse) -> bool:
    return response.meta_info.finish_reason.type is FinishReason.ABORT


def stop_token_ids(model: Path, tokenizer: Decoder) -> frozenset[int]:
    """Return the tokens at which SGLang ends a response.

    They are the tokenizer's, those of config.json and generation_config.json, and Llama 3's end of a message.
    """
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    ids = [getattr(tokenizer, "eos_token_id", None), added.get("<|eom_id|>")]
    for name in ("config.json", "generation_config.json"):
        if (model / name).exists():
            found = json.loads((model / name).read_bytes()).get("eos_token_id")
            ids += found if isinstance(found, list) else [found]
    return frozenset(token for token in ids if token is not None)

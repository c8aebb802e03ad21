"""Responses that a server has aborted, by a pause or for want of memory, and what is left of them to sample."""

from collections.abc import Sequence
from typing import Any

from megatron_a3po.fleet.protocol import FinishReasonInfo, GenerateResponse, MetaInfo, VersionSpan
from megatron_a3po.types import FinishReason


class Continuation:
    """The responses to one request, each joined from as many parts as it took. Tokens that are there are kept."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: frozenset[int] = frozenset()
    ) -> None:
        """prompts: one for each response. stop_token_ids: a response that ends with one of them is whole."""
        self._prompts = prompts
        self._max_new_tokens = max_new_tokens
        self._stop_token_ids = stop_token_ids
        self.responses: list[GenerateResponse] = []
        self._open = list(range(len(prompts)))

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, parts: Sequence[GenerateResponse]) -> str | None:
        """The answers for those that are open, in order. Returns why one was aborted, if one was."""
        if not self.responses:
            self.responses = list(parts)
        else:
            for number, part in zip(self._open, parts, strict=True):
                self.responses[number] = join(self.responses[number], part)
        aborted = [number for number in self._open if _is_aborted(self.responses[number])]
        reason = self.responses[aborted[0]].meta_info.finish_reason.message if aborted else None
        self._open = []
        for number in aborted:
            if (end := self._end(number)) is not None:
                last = GenerateResponse(meta_info=MetaInfo(finish_reason=FinishReasonInfo(type=end)))
                self.responses[number] = join(self.responses[number], last)
            else:
                self._open.append(number)
        return (reason or "no reason given") if self._open else None

    def request(self, first: dict[str, Any]) -> dict[str, Any]:
        """What is to be asked for now: `first` for the whole, then only what is missing."""
        if not self.responses:
            return first
        sampling = first["sampling_params"] | {"n": 1}
        return first | {
            "input_ids": [[*self._prompts[number], *self.responses[number].output_ids] for number in self._open],
            "sampling_params": [sampling | {"max_new_tokens": self._left(number)} for number in self._open],
        }

    def _end(self, number: int) -> FinishReason | None:
        """SGLang looks whether a request is aborted before it looks whether its last token ends it."""
        if self._stop_token_ids.intersection(self.responses[number].output_ids[-1:]):
            return FinishReason.STOP
        return FinishReason.LENGTH if self._left(number) == 0 else None

    def _left(self, number: int) -> int:
        return self._max_new_tokens - len(self.responses[number].output_ids)


def join(first: GenerateResponse, second: GenerateResponse) -> GenerateResponse:
    """One response from two parts, with the log-probs and the versions of both."""
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

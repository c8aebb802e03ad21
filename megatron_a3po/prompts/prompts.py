"""Which prompts are trained on, in which order, and which are kept for evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_a3po.prompts.encoder import PromptEncoder, Question


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question, ready to be sent to a rollout server, with what its reward is computed from."""

    prompt_id: str
    """The same in every run with the same data settings"""
    token_ids: tuple[int, ...]
    question: str = ""
    answer: Any = field(default=None, repr=False)
    row: Mapping[str, Any] = field(default_factory=dict, repr=False)


class Questions(Protocol):
    """Any number of questions, of which few are in memory."""

    def __getitem__(self, index: int) -> Question: ...


def make_prompt(question: Question, encoder: PromptEncoder) -> Prompt:
    return Prompt(
        prompt_id=question.prompt_id,
        token_ids=encoder.encode(question),
        question=question.text,
        answer=question.answer,
        row=question.row,
    )


class PromptSet:
    """Prompts of evaluations, and an endless stream of training prompts that depends on nothing but the index."""

    def __init__(
        self,
        *,
        questions: Questions,
        training: NDArray[np.int64],
        evaluation: Mapping[str, Sequence[Prompt]],
        encoder: PromptEncoder,
        order_seed: int,
        fingerprint: str,
        max_tokens: int,
    ) -> None:
        """`training`: [training prompts] indices into `questions`, of which each epoch has every one once. evaluation:
        by the name of their dataset. fingerprint: of the training prompts and their answers, in this order. max_tokens:
        no training prompt has more."""
        self._questions = questions
        self._training = training
        self._encoder = encoder
        self._order_seed = order_seed
        self.evaluation = evaluation
        self.fingerprint = fingerprint
        self.max_tokens = max_tokens

    def __len__(self) -> int:
        """Number of different training prompts, which is the length of an epoch."""
        return len(self._training)

    @property
    def held_out(self) -> Sequence[Prompt]:
        """Those of the first evaluation dataset."""
        return next(iter(self.evaluation.values()), ())

    def training_prompt(self, index: int) -> Prompt:
        """Prompt number `index` (from 0, without end) of the training stream.

        Every epoch is a fresh permutation of all training prompts, drawn from (order_seed, epoch) alone. So a run that
        was killed resumes the very stream it left, from nothing but the number of prompts it had taken.
        """
        if index < 0:
            raise IndexError(f"training prompts are numbered from 0, got {index}")
        epoch, position = divmod(index, len(self))
        order = _epoch_order(num_prompts=len(self), seed=self._order_seed, epoch=epoch)
        return make_prompt(self._questions[int(self._training[order[position]])], self._encoder)


@lru_cache(maxsize=4)  # the stream crosses from one epoch to the next while both are in use
def _epoch_order(*, num_prompts: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(num_prompts)

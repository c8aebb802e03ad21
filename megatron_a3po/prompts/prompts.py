"""The prompts of training, in their order, and of evaluations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_a3po.prompts.encoder import PromptEncoder, Question


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question as token ids for a rollout server, with the data that its reward is computed from."""

    prompt_id: str
    """The same in every run with the same data settings"""
    token_ids: tuple[int, ...]
    question: str = ""
    answer: Any = field(default=None, repr=False)
    row: Mapping[str, Any] = field(default_factory=dict, repr=False)


class Questions(Protocol):
    """A sequence of questions, in memory or not."""

    def __getitem__(self, index: int) -> Question:
        """Return one question."""


def make_prompt(question: Question, encoder: PromptEncoder) -> Prompt:
    """Encode a question. Raises ValueError for a conversation that cannot be written as text."""
    return Prompt(
        prompt_id=question.prompt_id,
        token_ids=encoder.encode(question),
        question=question.text,
        answer=question.answer,
        row=question.row,
    )


class PromptSet:
    """The prompts of evaluations, and an endless stream of training prompts that depends only on the index."""

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
        """Make the stream.

        Args:
            training: [training prompts] int64, indices into `questions`; each epoch has every one once.
            evaluation: prompts by the name of their dataset.
            fingerprint: a hash of the training prompts and their answers, in this order.
            max_tokens: length of the longest training prompt.
        """
        self._questions = questions
        self._training = training
        self._encoder = encoder
        self._order_seed = order_seed
        self.evaluation = evaluation
        self.fingerprint = fingerprint
        self.max_tokens = max_tokens

    def __len__(self) -> int:
        """Return the number of training prompts, which is the length of an epoch."""
        return len(self._training)

    @property
    def held_out(self) -> Sequence[Prompt]:
        """The prompts of the first evaluation dataset"""
        return next(iter(self.evaluation.values()), ())

    def training_prompt(self, index: int) -> Prompt:
        """Return prompt number `index`, from 0 without end, of the training stream.

        Every epoch is a new permutation of all training prompts, drawn from (order_seed, epoch) alone. So a resumed run
        needs only the number of prompts that were taken to continue the same stream.
        """
        if index < 0:
            raise IndexError(f"training prompts are numbered from 0, got {index}")
        epoch, position = divmod(index, len(self))
        order = _epoch_order(num_prompts=len(self), seed=self._order_seed, epoch=epoch)
        return make_prompt(self._questions[int(self._training[order[position]])], self._encoder)


@lru_cache(maxsize=4)  # two epochs are in use where one ends
def _epoch_order(*, num_prompts: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(num_prompts)

"""Prompts from a reasoning-gym task: which ones are trained on, in which order, and which are kept for evaluation."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatron_a3po.errors import DataError

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

Entry = dict[str, Any]
"""What reasoning-gym makes for one index: `question`, `answer` and `metadata`."""


class TextEncoder(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question, ready to be sent to a rollout server."""

    prompt_id: str
    """`task/seed/index` of the entry: the same in every run with the same data settings."""
    token_ids: tuple[int, ...]
    score: Callable[[str], float] = field(repr=False)
    """The task's own score of a response text, untouched: rounding it (a float32, a tolerance) makes wrong answers
    right, because partial credit sums to values such as 0.9999999999999999."""


class PromptSet:
    """Held-out prompts, and an endless stream of training prompts that depends on nothing but the index asked for."""

    def __init__(
        self,
        *,
        task: str,
        dataset: "ProceduralDataset",
        entries: Mapping[int, Entry],
        num_held_out: int,
        order_seed: int,
        tokenizer: TextEncoder,
    ) -> None:
        """Keep the first `num_held_out` of `entries` (dataset index -> entry) for evaluation, train on the others."""
        self._task = task
        self._dataset = dataset
        self._order_seed = order_seed
        self._tokenizer = tokenizer
        self._training = tuple(entries.items())[num_held_out:]
        self.held_out: Sequence[Prompt] = tuple(
            self._prompt(index, entry) for index, entry in tuple(entries.items())[:num_held_out]
        )

    def __len__(self) -> int:
        """Number of different training prompts, which is the length of an epoch."""
        return len(self._training)

    def training_prompt(self, index: int) -> Prompt:
        """Prompt number `index` (from 0, without end) of the training stream.

        Every epoch is a fresh permutation of all training prompts, drawn from (order_seed, epoch) alone. So a run that
        was killed resumes the very stream it left, from nothing but the number of prompts it had taken.
        """
        if index < 0:
            raise IndexError(f"training prompts are numbered from 0, got {index}")
        epoch, position = divmod(index, len(self))
        order = _epoch_order(num_prompts=len(self), seed=self._order_seed, epoch=epoch)
        return self._prompt(*self._training[order[position]])

    def _prompt(self, index: int, entry: Entry) -> Prompt:
        return Prompt(
            prompt_id=f"{self._task}/{self._dataset.seed}/{index}",
            token_ids=tuple(self._tokenizer.encode(entry["question"], add_special_tokens=False)),
            score=partial(self._dataset.score_answer, entry=entry),
        )


def load_prompts(
    *,
    task: str,
    task_options: Mapping[str, Any],
    size: int,
    seed: int,
    prompt_pattern: str | None,
    num_held_out: int,
    tokenizer: TextEncoder,
    order_seed: int = 0,
) -> PromptSet:
    """Make the prompts of a reasoning-gym task.

    Args:
        task: name that the task is registered under, for instance `spell_backward`.
        task_options: the task's own settings, without `size` and `seed`.
        size: number of entries to generate; fewer prompts remain after the pattern and after dropping duplicates.
        seed: seeds the entries, and so the split into held-out and training prompts; at least 0.
        prompt_pattern: regular expression that the whole question must match; None keeps every question.
        num_held_out: the first so many prompts are never trained on.
        order_seed: seeds the order of every epoch; at least 0.
        tokenizer: encodes the questions, as they are, without special tokens.

    Raises:
        DataError: unknown task, settings that the task refuses, a broken pattern, or too few prompts.
    """
    dataset = _create_dataset(task, task_options, size=size, seed=seed)
    try:
        pattern = re.compile(prompt_pattern) if prompt_pattern is not None else None
    except re.error as error:
        raise DataError(f"prompt_pattern {prompt_pattern!r} is not a regular expression: {error}") from error
    entries = _select(((index, dataset[index]) for index in range(size)), pattern)
    if not 0 <= num_held_out < len(entries):
        raise DataError(
            f"task {task!r} gives {len(entries)} different prompts out of size={size} (prompt_pattern="
            f"{prompt_pattern!r}), of which num_held_out={num_held_out} are to be kept for evaluation and at least one "
            "must remain for training: raise size, lower num_held_out, or loosen prompt_pattern or the task's options"
        )
    return PromptSet(
        task=task,
        dataset=dataset,
        entries=entries,
        num_held_out=num_held_out,
        order_seed=order_seed,
        tokenizer=tokenizer,
    )


def _create_dataset(task: str, task_options: Mapping[str, Any], *, size: int, seed: int) -> "ProceduralDataset":
    # Imported here: it takes about a second, and many commands of the package never ask for a prompt.
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        raise DataError(f"reasoning-gym has no task {task!r}; {_nearest(task, DATASETS)}")
    if size < 1 or seed < 0:
        raise DataError(f"task {task!r} needs size >= 1 and seed >= 0, got size={size} and seed={seed}")
    known_options = {option.name for option in fields(DATASETS[task][1])} - {"size", "seed"}
    for option in task_options:
        if option not in known_options:
            raise DataError(f"task {task!r} has no option {option!r}; {_nearest(option, known_options)}")
    try:
        return create_dataset(task, size=size, seed=seed, **task_options)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"task {task!r} refuses the options {dict(task_options)}: {error}") from error


def _select(indexed_entries: Iterable[tuple[int, Entry]], pattern: re.Pattern[str] | None) -> dict[int, Entry]:
    """The entries whose question matches, each question once whatever its case, in the order given."""
    chosen: dict[int, Entry] = {}
    seen: set[str] = set()
    for index, entry in indexed_entries:
        question = entry["question"]
        if pattern is not None and pattern.fullmatch(question) is None:
            continue
        if question.casefold() not in seen:
            seen.add(question.casefold())
            chosen[index] = entry
    return chosen


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names)
    return f"did you mean {' or '.join(near)}?" if near else f"known names: {', '.join(names)}"


@lru_cache(maxsize=4)  # the stream crosses from one epoch to the next while both are in use
def _epoch_order(*, num_prompts: int, seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng((seed, epoch)).permutation(num_prompts).tolist())

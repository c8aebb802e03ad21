"""Make the prompts of a reasoning-gym task."""

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_a3po.config import HELD_OUT
from megatron_a3po.errors import DataError
from megatron_a3po.prompts.encoder import PromptEncoder, Question
from megatron_a3po.prompts.prompts import Prompt, PromptSet, make_prompt
from megatron_a3po.runtime.logging import logger

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

Entry = dict[str, Any]
"""reasoning-gym's entry for one index: `question`, `answer` and `metadata`"""


def load_task(
    *,
    task: str,
    task_options: Mapping[str, Any],
    size: int,
    seed: int,
    prompt_pattern: str | None,
    num_held_out: int,
    encoder: PromptEncoder,
    evaluation: Mapping[str, Sequence[Prompt]] = MappingProxyType({}),
    order_seed: int = 0,
    max_prompt_tokens: int | None = None,
    vocab_size: int | None = None,
) -> PromptSet:
    """Make the prompts of a reasoning-gym task.

    Args:
        task: its name in reasoning-gym, for instance `spell_backward`.
        task_options: its own settings, without `size` and `seed`.
        size: number of entries to generate; fewer prompts remain after the pattern and after dropping duplicates.
        seed: seeds the entries, and so decides which are held out; at least 0.
        prompt_pattern: regular expression that the whole question must match; None keeps every question.
        num_held_out: how many prompts, from the first, are kept for evaluation.
        encoder: encodes the questions.
        evaluation: further prompts for evaluations by the name of their dataset.
        order_seed: seeds the order of every epoch; at least 0.
        max_prompt_tokens: longer prompts are left out; None: no limit.
        vocab_size: of the model; None: unknown.

    Raises:
        DataError: the task is unknown or refuses its settings, the pattern is invalid, there are too few prompts, or
            the tokenizer belongs to another model.
    """
    dataset = _create_dataset(task, task_options, size=size, seed=seed)
    entries = _select(((index, dataset[index]) for index in range(size)), _compiled(prompt_pattern))
    questions = [_question(f"{task}/{seed}/{index}", entry) for index, entry in entries.items()]
    num_different = len(questions)
    questions, max_tokens = _fitting(questions, encoder, max_prompt_tokens, vocab_size)
    if not 0 <= num_held_out < len(questions):
        raise DataError(
            f"data.task = {task!r} gives {num_different} different prompts out of data.size = {size} "
            f"(data.prompt_pattern = {prompt_pattern!r}), {len(questions)} of them short enough (max_prompt_tokens = "
            f"{max_prompt_tokens}), but data.num_held_out = {num_held_out} are for evaluation, and training needs at "
            "least one; raise data.size, lower data.num_held_out, or loosen data.prompt_pattern or data.task_options"
        )
    held_out = [make_prompt(question, encoder) for question in questions[:num_held_out]]
    return PromptSet(
        questions=questions,
        training=np.arange(num_held_out, len(questions)),
        evaluation=({HELD_OUT: held_out} if held_out else {}) | dict(evaluation),
        encoder=encoder,
        order_seed=order_seed,
        fingerprint=_fingerprint(questions[num_held_out:]),
        max_tokens=max_tokens,
    )


def _fingerprint(questions: Sequence[Question]) -> str:
    content = json.dumps([[question.prompt, question.answer] for question in questions])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _fitting(
    questions: list[Question], encoder: PromptEncoder, max_prompt_tokens: int | None, vocab_size: int | None
) -> tuple[list[Question], int]:
    """Return the questions that are short enough, and the length in tokens of the longest."""
    encoded = encoder.encode_all(questions)
    largest = max((max(token_ids) for token_ids in encoded), default=0)
    if vocab_size is not None and largest >= vocab_size:  # which would crash a server
        raise DataError(
            f"the tokenizer gives id {largest}, but the model's vocabulary has {vocab_size} entries: the tokenizer in "
            "the model's folder belongs to another model; copy the model's own"
        )
    lengths = list(map(len, encoded))
    limit = max(lengths, default=0) if max_prompt_tokens is None else max_prompt_tokens
    kept = [question for question, length in zip(questions, lengths, strict=True) if length <= limit]
    if len(kept) < len(questions):
        logger.warning("%d prompts of over %d tokens are left out", len(questions) - len(kept), limit)
    return kept, max((length for length in lengths if length <= limit), default=0)


def _question(prompt_id: str, entry: Entry) -> Question:
    return Question(prompt_id=prompt_id, prompt=entry["question"], answer=entry["answer"], row=entry)


def _create_dataset(task: str, task_options: Mapping[str, Any], *, size: int, seed: int) -> "ProceduralDataset":
    # Imported here: it takes about a second, and many commands need no prompt.
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        raise DataError(f"data.task = {task!r}: reasoning-gym has no such task; {_nearest(task, DATASETS)}")
    if size < 1 or seed < 0:
        raise DataError(
            f"data.task = {task!r} needs data.size >= 1 and data.seed >= 0, not data.size = {size}, data.seed = {seed}"
        )
    known_options = {option.name for option in fields(DATASETS[task][1])} - {"size", "seed"}
    for option in task_options:
        if option not in known_options:
            raise DataError(f"data.task_options: {task!r} has no option {option!r}; {_nearest(option, known_options)}")
    try:
        return create_dataset(task, size=size, seed=seed, **task_options)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(
            f"data.task_options = {dict(task_options)}: {task!r} refuses them: {error}; correct them"
        ) from error


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern) if pattern is not None else None
    except re.error as error:
        raise DataError(
            f"data.prompt_pattern = {pattern!r} is not a regular expression: {error}; correct it"
        ) from error


def _select(indexed_entries: Iterable[tuple[int, Entry]], pattern: re.Pattern[str] | None) -> dict[int, Entry]:
    """Return the entries whose question matches, in order. Questions that differ only in case count once."""
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

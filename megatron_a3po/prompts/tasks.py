"""Prompts of a reasoning-gym task."""

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
"""What reasoning-gym makes for one index: `question`, `answer` and `metadata`."""


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
        task: name that the task is registered under, for instance `spell_backward`.
        task_options: the task's own settings, without `size` and `seed`.
        size: number of entries to generate; fewer prompts remain after the pattern and after dropping duplicates.
        seed: seeds the entries, and so the split into held-out and training prompts; at least 0.
        prompt_pattern: regular expression that the whole question must match; None keeps every question.
        num_held_out: the first so many prompts are never trained on.
        encoder: makes token ids of the questions.
        evaluation: more prompts for evaluations, by the name of their dataset.
        order_seed: seeds the order of every epoch; at least 0.
        max_prompt_tokens: longer prompts are left out; None: none is.
        vocab_size: of the model; None: unknown.

    Raises:
        DataError: unknown task, settings that the task refuses, a broken pattern, too few prompts, or a tokenizer of
            another model.
    """
    dataset = _create_dataset(task, task_options, size=size, seed=seed)
    try:
        pattern = re.compile(prompt_pattern) if prompt_pattern is not None else None
    except re.error as error:
        raise DataError(f"prompt_pattern {prompt_pattern!r} is not a regular expression: {error}") from error
    entries = _select(((index, dataset[index]) for index in range(size)), pattern)
    questions = [_question(f"{task}/{seed}/{index}", entry) for index, entry in entries.items()]
    num_different = len(questions)
    questions, max_tokens = _fitting(questions, encoder, max_prompt_tokens, vocab_size)
    if not 0 <= num_held_out < len(questions):
        raise DataError(
            f"task {task!r} gives {num_different} different prompts out of size={size} (prompt_pattern="
            f"{prompt_pattern!r}), {len(questions)} of them short enough (max_prompt_tokens={max_prompt_tokens}), of "
            f"which num_held_out={num_held_out} are to be kept for evaluation and at least one must remain for "
            "training: raise size, lower num_held_out, or loosen prompt_pattern or the task's options"
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
    """Those that are short enough, and the length of the longest one."""
    encoded = encoder.encode_all(questions)
    largest = max((max(token_ids) for token_ids in encoded), default=0)
    if vocab_size is not None and largest >= vocab_size:  # of which a server dies
        raise DataError(
            f"the tokenizer gives id {largest}, but the model's vocabulary has {vocab_size} entries: the tokenizer in "
            "the model's folder belongs to another model"
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

"""One pass over a dataset: what is good goes to the store, what is bad to quarantine, and what is long is left out."""

import hashlib
import json
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_a3po.prompts.encoder import PromptEncoder, Question
from megatron_a3po.prompts.files import SourceRow, open_source
from megatron_a3po.prompts.rejected_rows import Quarantine
from megatron_a3po.prompts.rows import BadRow, RowProblem, Schema, to_question
from megatron_a3po.prompts.store import QuestionStore
from megatron_a3po.runtime.logging import screen

_BATCH = 512
_BAR_AFTER_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanSettings:
    schema: Schema
    encoder: PromptEncoder
    max_prompt_tokens: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What one pass has found."""

    num_rows: int
    num_too_long: int
    num_repeats: int
    """Rows with the prompt and the answer of an earlier one"""
    kept: NDArray[np.int64]
    """Indices into the store, in the order of the dataset"""
    prompt_hashes: NDArray[np.uint64]
    """Of each kept row"""
    max_tokens: int
    """Of the longest kept prompt"""
    fingerprint: str
    """Of all kept prompts and answers in their order"""


def scan(path: Path, split: str | None, settings: ScanSettings, store: QuestionStore, quarantine: Quarantine) -> Scan:
    """Read the whole dataset once. Its questions are appended to `store`."""
    first = len(store)
    found = _Found()
    num_rows = num_too_long = max_tokens = 0
    for rows in batched(_rows_with_progress(path, split), _BATCH):
        good = list(_questions(rows, num_rows, path.stem, settings.schema, quarantine))
        num_rows += len(rows)
        for (row, question), token_ids in zip(good, _encode(good, settings, quarantine), strict=True):
            if token_ids is None:
                continue
            if len(token_ids) > settings.max_prompt_tokens:
                num_too_long += 1
                continue
            try:
                _check_vocabulary(token_ids, settings.vocab_size)
                store.append(question)
            except RowProblem as problem:
                _reject(quarantine, problem, row)
                continue
            found.add(question, row.number)
            max_tokens = max(max_tokens, len(token_ids))
    is_repeat = _drop_repeats(found, store, first, path, quarantine)
    kept = np.flatnonzero(~is_repeat)
    hashes = found.column("prompts")[kept]
    answers = found.column("answers")[kept]
    return Scan(
        num_rows=num_rows,
        num_too_long=num_too_long,
        num_repeats=found.num_repeats,
        kept=kept + first,
        prompt_hashes=hashes,
        max_tokens=max_tokens,
        fingerprint=hashlib.blake2b(hashes.tobytes() + answers.tobytes(), digest_size=16).hexdigest(),
    )


class _Found:
    """Hashes and numbers of the rows in the store: 32 bytes each."""

    def __init__(self) -> None:
        self._columns = {name: array("Q") for name in ("prompts", "answers", "ids", "numbers")}
        self.num_repeats = 0

    def add(self, question: Question, number: int) -> None:
        for name, value in (("prompts", question.prompt), ("answers", question.answer), ("ids", question.prompt_id)):
            self._columns[name].append(_hash(value))
        self._columns["numbers"].append(number)

    def column(self, name: str) -> NDArray[np.uint64]:
        return np.frombuffer(self._columns[name], dtype=np.uint64)


def _hash(value: Any) -> int:
    """Of two different ones among a million, two are the same once in 4e7 times."""
    content = json.dumps(value, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _drop_repeats(
    found: _Found, store: QuestionStore, first: int, path: Path, quarantine: Quarantine
) -> NDArray[np.bool_]:
    """[rows in the store] Which rows ask what an earlier one has asked. Some datasets hold every row many times, so
    that is no mistake of theirs; to contradict an earlier row is one, and so is to use its id for something else."""
    prompts, answers, ids, numbers = (found.column(name) for name in ("prompts", "answers", "ids", "numbers"))
    earlier = _first_of_each(prompts)
    is_repeat = earlier != np.arange(len(prompts))
    contradicts = is_repeat & (answers != answers[earlier])
    found.num_repeats = int((is_repeat & ~contradicts).sum())
    remaining = np.flatnonzero(~is_repeat)
    earlier_id = np.arange(len(ids))
    earlier_id[remaining] = remaining[_first_of_each(ids[remaining])]
    takes_id = remaining[earlier_id[remaining] != remaining]
    bad = [(index, BadRow.CONTRADICTION, "the prompt", earlier[index]) for index in np.flatnonzero(contradicts)]
    bad += [(index, BadRow.DUPLICATE_ID, "the id", earlier_id[index]) for index in takes_id]
    for index, reason, what, before in bad:
        question = store[first + int(index)]
        shown = {"prompt": question.prompt, "answer": question.answer, **question.row}
        detail = f"{what} of line {numbers[before]}, and something else besides ({question.prompt_id})"
        quarantine.add(reason, detail, source=path.name, line=int(numbers[index]), row=shown)
    is_repeat[takes_id] = True
    return is_repeat


def _first_of_each(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """[n] int64: for each value the index where it stands first."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return np.asarray(first[inverse], dtype=np.int64)


def _questions(
    rows: tuple[SourceRow, ...], num_before: int, source: str, schema: Schema, quarantine: Quarantine
) -> Iterator[tuple[SourceRow, Question]]:
    for number, row in enumerate(rows, num_before + 1):  # over all files of the dataset
        try:
            if isinstance(row.content, RowProblem):
                raise row.content
            yield row, to_question(row.content, schema, source=source, number=number)
        except RowProblem as problem:
            _reject(quarantine, problem, row)


def _encode(
    good: list[tuple[SourceRow, Question]], settings: ScanSettings, quarantine: Quarantine
) -> list[list[int] | None]:
    try:
        return list(settings.encoder.encode_all([question for _, question in good]))
    except ValueError:  # of one conversation; which one?
        return [_encode_one(row, question, settings, quarantine) for row, question in good]


def _encode_one(row: SourceRow, question: Question, settings: ScanSettings, quarantine: Quarantine) -> list[int] | None:
    try:
        return list(settings.encoder.encode(question))
    except ValueError as error:
        _reject(quarantine, RowProblem(BadRow.WRONG_TYPE, str(error)), row)
        return None


def _check_vocabulary(token_ids: list[int], vocab_size: int) -> None:
    """A server dies of an id outside its vocabulary."""
    outside = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise RowProblem(
            BadRow.OUTSIDE_VOCABULARY, f"token {outside}, but the model's vocabulary has {vocab_size} entries"
        )


def _reject(quarantine: Quarantine, problem: RowProblem, row: SourceRow) -> None:
    raw = None if isinstance(row.raw, RowProblem) else row.raw
    quarantine.add(problem.reason, problem.detail, source=row.file, line=row.number, row=raw)


def _rows_with_progress(path: Path, split: str | None) -> Iterator[SourceRow]:
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # starts no thread

    source = open_source(path, split)
    stream = screen() or sys.stderr
    with Bar(
        total=source.size,
        desc=f"reading {path.name}",
        unit=source.unit,
        unit_scale=True,
        file=stream,
        delay=_BAR_AFTER_SECONDS,
        # In a file, a line now and then.
        mininterval=0.5 if stream.isatty() else 30.0,
        leave=False,
    ) as bar:
        for row, amount in source.rows():
            yield row
            bar.update(amount)

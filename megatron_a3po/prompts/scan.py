"""Read a dataset once: store the good rows, write down the rejected ones, and leave out long prompts and repeats."""

import hashlib
import json
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from megatron_a3po.prompts.encoder import PromptEncoder, Question
from megatron_a3po.prompts.files import SourceRow, open_source
from megatron_a3po.prompts.rows import BadRow, RowProblem, Schema, to_question
from megatron_a3po.prompts.store import QuestionStore
from megatron_a3po.runtime.logging import screen

_BATCH = 512
_BAR_AFTER_SECONDS = 2.0
_MAX_ROW_CHARACTERS = 2000
_MAX_ROWS = 10_000
"""More rejected rows are counted but not written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanSettings:
    """How rows become prompts, and which prompts are accepted."""

    schema: Schema
    encoder: PromptEncoder
    max_prompt_tokens: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """The result of reading a dataset."""

    num_rows: int
    num_too_long: int
    num_repeats: int
    """Rows with the prompt and the answer of an earlier row"""
    kept: NDArray[np.int64]
    """Indices into the store, in the order of the dataset"""
    prompt_hashes: NDArray[np.uint64]
    """One for each kept row"""
    max_tokens: int
    """Length of the longest kept prompt"""
    fingerprint: str
    """A hash of all kept prompts and answers in their order"""


class RejectedRows:
    """Count rejected rows by reason, and write each as a line with source, line, reason, detail and the row, cut short.

    A context manager. It removes the file of an earlier start, and writes none if all rows are good.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self.path.unlink(missing_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, reason: BadRow, detail: str, *, source: str, line: int, row: Any) -> None:
        """Count a row, and write it unless very many were written before."""
        self.counts[reason] += 1
        if self.counts.total() > _MAX_ROWS:
            return
        if self._file is None:
            self._file = self.path.open("w", encoding="utf-8")
        entry = {"source": source, "line": line, "reason": reason, "detail": detail[:500], "row": _shown(row)}
        self._file.write(json.dumps(entry) + "\n")

    def __str__(self) -> str:
        return ", ".join(f"{number} {reason}" for reason, number in self.counts.most_common())


def _shown(row: Any) -> str:
    if isinstance(row, bytes):
        return row[:_MAX_ROW_CHARACTERS].decode("utf-8", errors="backslashreplace").rstrip("\n")
    try:
        text = json.dumps(row, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(row)
    return text[:_MAX_ROW_CHARACTERS]


def scan(path: Path, split: str | None, settings: ScanSettings, store: QuestionStore, rejected: RejectedRows) -> Scan:
    """Read the whole dataset once, and append its questions to `store`. Raises DataError."""
    first = len(store)
    found = _Found()
    num_rows = num_too_long = max_tokens = 0
    for rows in batched(_rows_with_progress(path, split), _BATCH):
        good = list(_questions(rows, num_rows, path.stem, settings.schema, rejected))
        num_rows += len(rows)
        for (row, question), token_ids in zip(good, _encode(good, settings, rejected), strict=True):
            if token_ids is None:
                continue
            if len(token_ids) > settings.max_prompt_tokens:
                num_too_long += 1
                continue
            try:
                _check_vocabulary(token_ids, settings.vocab_size)
                store.append(question)
            except RowProblem as problem:
                _reject(rejected, problem, row)
                continue
            found.add(question, row.number)
            max_tokens = max(max_tokens, len(token_ids))
    is_repeat = _drop_repeats(found, store, first, path, rejected)
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
    """Hashes and line numbers of the rows in the store: 32 bytes for each."""

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
    """Hash to 64 bits: a dataset of a million values has two with the same hash with a probability of 3e-8."""
    content = json.dumps(value, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _drop_repeats(
    found: _Found, store: QuestionStore, first: int, path: Path, rejected: RejectedRows
) -> NDArray[np.bool_]:
    """Return [rows in the store] which rows have the prompt of an earlier row, or are rejected.

    Some datasets hold every row many times, so a repeat is not a mistake. A row is rejected if it contradicts the
    answer of an earlier row, or uses its id for another prompt.
    """
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
        detail = f"{what} of line {numbers[before]}, but something else differs ({question.prompt_id})"
        rejected.add(reason, detail, source=path.name, line=int(numbers[index]), row=shown)
    is_repeat[takes_id] = True
    return is_repeat


def _first_of_each(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return [n] int64: for each value the index of its first occurrence."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return np.asarray(first[inverse], dtype=np.int64)


def _questions(
    rows: tuple[SourceRow, ...], num_before: int, source: str, schema: Schema, rejected: RejectedRows
) -> Iterator[tuple[SourceRow, Question]]:
    for number, row in enumerate(rows, num_before + 1):  # numbered over all files of the dataset
        try:
            if isinstance(row.content, RowProblem):
                raise row.content
            yield row, to_question(row.content, schema, source=source, number=number)
        except RowProblem as problem:
            _reject(rejected, problem, row)


def _encode(
    good: list[tuple[SourceRow, Question]], settings: ScanSettings, rejected: RejectedRows
) -> list[list[int] | None]:
    try:
        return list(settings.encoder.encode_all([question for _, question in good]))
    except ValueError:  # the chat template refuses one of them; which one?
        return [_encode_one(row, question, settings, rejected) for row, question in good]


def _encode_one(row: SourceRow, question: Question, settings: ScanSettings, rejected: RejectedRows) -> list[int] | None:
    try:
        return list(settings.encoder.encode(question))
    except ValueError as error:
        _reject(rejected, RowProblem(BadRow.WRONG_TYPE, str(error)), row)
        return None


def _check_vocabulary(token_ids: list[int], vocab_size: int) -> None:
    """Raise RowProblem for an id outside the vocabulary, which would crash a server."""
    outside = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise RowProblem(
            BadRow.OUTSIDE_VOCABULARY, f"token {outside}, but the model's vocabulary has {vocab_size} entries"
        )


def _reject(rejected: RejectedRows, problem: RowProblem, row: SourceRow) -> None:
    raw = None if isinstance(row.raw, RowProblem) else row.raw
    rejected.add(problem.reason, problem.detail, source=row.file, line=row.number, row=raw)


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
        # In a log file, few lines.
        mininterval=0.5 if stream.isatty() else 30.0,
        leave=False,
    ) as bar:
        for row, amount in source.rows():
            yield row
            bar.update(amount)

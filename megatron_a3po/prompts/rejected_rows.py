"""Rows that cannot be used: counted by reason, and written down for whoever repairs the dataset."""

import json
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from megatron_a3po.prompts.rows import BadRow

_MAX_ROW_CHARACTERS = 2000
_MAX_ROWS = 10_000
"""More are only counted: what is wrong shows long before."""


class Quarantine:
    """`quarantine.jsonl`: a line per bad row with source, line, reason, detail and the row itself, cut to a bound.

    A context manager; the file of an earlier start goes, and there is none where all rows are good.
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

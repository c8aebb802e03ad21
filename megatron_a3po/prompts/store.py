"""Keep questions on the disk, with eight bytes of memory for each."""

import json
import os
import tempfile
from array import array
from pathlib import Path
from typing import Any

from megatron_a3po.errors import DataError
from megatron_a3po.prompts.encoder import Question
from megatron_a3po.prompts.rows import BadRow, RowProblem


class QuestionStore:
    """An append-only sequence of questions in an unnamed file, which ends with the process.

    So a run does not depend on its dataset after the start, and a dataset of any format is read only once, in order.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (open as long as the store)
        self._ends = array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Question:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end = self._ends[index], self._ends[index + 1]
        self._file.flush()
        content: dict[str, Any] = json.loads(os.pread(self._file.fileno(), end - start, start))
        return Question(**content)

    def append(self, question: Question) -> None:
        """Append a question. Raises RowProblem for types that JSON does not have, and DataError if the disk is full."""
        content = {
            "prompt_id": question.prompt_id,
            "prompt": question.prompt,
            "answer": question.answer,
            "row": question.row,
        }
        try:
            encoded = json.dumps(content).encode()
        except (TypeError, ValueError) as error:
            raise RowProblem(BadRow.WRONG_TYPE, str(error)) from None
        try:
            self._file.write(encoded)
        except OSError as error:
            raise DataError(f"run_dir has no room for a copy of the dataset: {error}; free disk space there") from error
        self._ends.append(self._ends[-1] + len(encoded))

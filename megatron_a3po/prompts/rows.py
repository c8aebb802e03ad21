"""Turn a row of a dataset into a question, or say why it cannot be one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_a3po.prompts.encoder import Question

PROMPT, ANSWER, ID = "prompt", "answer", "id"


class BadRow(StrEnum):
    """Why a row is rejected."""

    BROKEN_JSON = "broken_json"
    INVALID_UTF8 = "invalid_utf8"
    TOO_LONG = "line_too_long"
    WRONG_TYPE = "wrong_type"
    MISSING_COLUMN = "missing_column"
    EMPTY = "empty"
    DUPLICATE_ID = "duplicate_id"
    CONTRADICTION = "contradiction"
    """The prompt of an earlier row with another answer"""
    OUTSIDE_VOCABULARY = "token_outside_vocabulary"


class RowProblem(Exception):
    """A row cannot be used."""

    def __init__(self, reason: BadRow, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """The columns of a dataset.

    `columns` maps `prompt`, `answer`, `id` and any names that a reward function needs to columns. Dots in a column lead
    into nested ones.
    """

    columns: Mapping[str, str]
    instruction: str = ""
    """The end of each question, unless the configuration has another one"""
    read_answer: Callable[[Any], Any] = lambda answer: answer


def _gsm8k_answer(solution: Any) -> Any:
    """Return the number after the solution's "####", without commas. Raises RowProblem."""
    if not isinstance(solution, str):
        return solution
    _, found, answer = solution.rpartition("####")
    if not found:
        raise RowProblem(BadRow.WRONG_TYPE, 'the answer has no "####"')
    return answer.strip().replace(",", "")


SCHEMAS = {
    "gsm8k": Schema(
        columns={PROMPT: "question", ANSWER: "answer"},
        instruction="Please reason step by step, and put your final answer within \\boxed{}.",
        read_answer=_gsm8k_answer,
    ),
    # The prompts already say how to answer.
    "dapo_math": Schema(columns={PROMPT: "prompt", ANSWER: "reward_model.ground_truth", ID: "extra_info.index"}),
}


def make_schema(columns: str | Mapping[str, str]) -> Schema:
    """Return the built-in schema of this name, or the schema of a mapping."""
    return SCHEMAS[columns] if isinstance(columns, str) else Schema(columns=columns)


def to_question(row: Mapping[str, Any], schema: Schema, *, source: str, number: int) -> Question:
    """Convert a row. `number`, of the row in its dataset, is its id if the schema has none. Raises RowProblem."""
    values = {name: _value(row, path) for name, path in schema.columns.items()}
    prompt = _checked_prompt(values.pop(PROMPT))
    answer = None
    if ANSWER in schema.columns:
        answer = schema.read_answer(values.pop(ANSWER))
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            raise RowProblem(BadRow.EMPTY, "the answer is empty")
        _check_text(answer)
    identity = values.pop(ID, number)
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise RowProblem(BadRow.WRONG_TYPE, f"the id is {identity!r:.100}, neither text nor a whole number")
    _check_text(identity)
    return Question(prompt_id=f"{source}/{identity}", prompt=prompt, answer=answer, row=values)


def _value(row: Any, path: str) -> Any:
    value = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(map(str, row)) if isinstance(row, Mapping) else ""
            raise RowProblem(BadRow.MISSING_COLUMN, f"no column {path!r}; there are: {known:.300}")
        value = value[part]
    return value


def _checked_prompt(prompt: Any) -> Any:
    if prompt is None or prompt in ("", []) or (isinstance(prompt, str) and not prompt.strip()):
        raise RowProblem(BadRow.EMPTY, "the prompt is empty")
    if isinstance(prompt, str):
        _check_text(prompt)
        return prompt
    if isinstance(prompt, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return prompt
    if not isinstance(prompt, list) or not all(map(_is_message, prompt)):
        kind = type(prompt).__name__
        raise RowProblem(
            BadRow.WRONG_TYPE, f"the prompt is {kind}: neither text, nor messages with role and content, nor token ids"
        )
    if not prompt[-1]["content"].strip():
        raise RowProblem(BadRow.EMPTY, "the last message is empty")
    for message in prompt:
        _check_text(message["content"])
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


def _check_text(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RowProblem(BadRow.INVALID_UTF8, "half a surrogate pair, which is not a character") from None

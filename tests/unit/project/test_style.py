"""Sizes that keep the code readable. An exception is a line here, with its reason; one that is not needed fails."""

import ast
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT

MAX_FILE_LINES, MAX_FOLDER_FILES, MAX_FUNCTION_LINES = 400, 14, 60
MAX_PARAMETERS, MAX_KEYWORD_PARAMETERS = 7, 10
"""Parameters that may be given by position; parameters that are keyword-only."""

LONG_FILES: dict[str, str] = {}
FULL_FOLDERS: dict[str, str] = {
    "tools": "commands that know nothing of each other",
    "tests/distributed": "programs that know nothing of each other",
    "tests/e2e": "programs that know nothing of each other",
}
LONG_FUNCTIONS: dict[str, str] = {
    "megatron_a3po/algorithm/loss.py:decoupled_ppo_loss": "one formula; half of it is its signature and docstring",
}
MANY_PARAMETERS: dict[str, str] = {
    "megatron_a3po/prompts/tasks.py:load_task": "the options of a task, by their names",
    "megatron_a3po/parallel/triton_logprobs.py:_statistics_kernel": "pointers and sizes of a kernel",
}


@dataclass(frozen=True, kw_only=True)
class Function:
    name: str
    lines: int
    positional: int
    keyword_only: int


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Return every Python file of the package, the tools and the tests by its path in the checkout."""
    paths = [path for folder in ("megatron_a3po", "tools", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture(scope="module")
def functions(texts: dict[str, str]) -> list[Function]:
    return [
        Function(
            name=f"{path}:{node.name}",
            lines=(node.end_lineno or 0) - node.lineno + 1,
            positional=len([each for each in node.args.args if each.arg not in ("self", "cls", "ctx")]),
            keyword_only=len(node.args.kwonlyargs),
        )
        for path, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_files_are_short(texts: dict[str, str]) -> None:
    assert {path for path, text in texts.items() if len(text.splitlines()) > MAX_FILE_LINES} == LONG_FILES.keys()


def test_folders_hold_few_files(texts: dict[str, str]) -> None:
    files = Counter(str(Path(path).parent) for path in texts if Path(path).name != "__init__.py")
    assert {folder for folder, number in files.items() if number > MAX_FOLDER_FILES} == FULL_FOLDERS.keys()


def test_functions_are_short(functions: list[Function]) -> None:
    assert {each.name for each in functions if each.lines > MAX_FUNCTION_LINES} == LONG_FUNCTIONS.keys()


def test_functions_take_few_parameters(functions: list[Function]) -> None:
    many = {
        each.name
        for each in functions
        if each.positional > MAX_PARAMETERS or each.keyword_only > MAX_KEYWORD_PARAMETERS
    }
    assert many == MANY_PARAMETERS.keys()


def test_the_training_loop_is_a_page() -> None:
    assert len((ROOT / "megatron_a3po" / "train.py").read_text(encoding="utf-8").splitlines()) <= 80

"""Sizes that keep the code readable. An exception is a line here, with its reason."""

import ast
from pathlib import Path

from tests.support.paths import ROOT

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 300, 60, 7
MAX_TEST_FILE_LINES = 500
"""A file of tests is looked up in, not read through."""
LONG_FUNCTIONS: dict[str, str] = {
    "megatron_a3po/algorithm/loss.py:decoupled_ppo_loss": "one formula; half of it is its signature and docstring",
}
MANY_PARAMETERS: dict[str, str] = {
    "megatron_a3po/parallel/triton_logprobs.py:_statistics_kernel": "pointers and sizes of a kernel",
}


def sources() -> list[Path]:
    return [path for folder in ("megatron_a3po", "tools", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]


def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (f"{path.relative_to(ROOT)}:{node.name}", node)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_no_file_is_longer_than_a_reader_keeps_in_mind() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    limits = {name: MAX_TEST_FILE_LINES if name.startswith("tests/") else MAX_FILE_LINES for name in lengths}
    assert {name: length for name, length in lengths.items() if length > limits[name]} == {}


def test_functions_are_short_and_the_exceptions_are_needed() -> None:
    long = {name for name, node in functions() if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES}
    assert long == LONG_FUNCTIONS.keys()


def test_functions_take_few_positional_parameters_and_the_exceptions_are_needed() -> None:
    many = {
        name
        for name, node in functions()
        if len([argument for argument in node.args.args if argument.arg not in ("self", "cls", "ctx")]) > MAX_PARAMETERS
    }
    assert many == MANY_PARAMETERS.keys()


def test_the_training_loop_is_a_page() -> None:
    assert len((ROOT / "megatron_a3po" / "train.py").read_text(encoding="utf-8").splitlines()) <= 80

"""Compare mistakes by what they must name: the key, its value and the remedy."""

from collections.abc import Iterable

from megatron_a3po.config.mistakes import Mistake


def assert_named(mistakes: Iterable[Mistake], *expected: str) -> None:
    """Compare with texts of the form `KEY = VALUE: words of the problem; words of the remedy`, the words optional."""
    found = list(mistakes)
    assert len(found) == len(expected), found
    for mistake, text in zip(found, expected, strict=True):
        named, _, remedy = text.partition("; ")
        start = mistake.key if mistake.value is None else f"{mistake.key} = {mistake.value!r}"
        assert named.startswith(start) and mistake.remedy
        problem = named.removeprefix(start).removeprefix(": ")
        assert problem in mistake.problem and remedy in mistake.remedy, mistake

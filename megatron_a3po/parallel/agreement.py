"""Fail together: what goes wrong on one rank is raised on every rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_a3po import errors
from megatron_a3po.errors import A3poError, PublishError
from megatron_a3po.parallel.messages import broadcast_json, gather_json

EXPECTED = (A3poError, RuntimeError, OSError)
"""Errors of torch.distributed, HTTP and files; any other one is a mistake in the program."""


@contextmanager
def as_publish_error(what: str) -> Iterator[None]:
    """Turn an expected error into a PublishError whose message begins with `what`."""
    try:
        yield
    except EXPECTED as error:
        raise PublishError(f"{what}: {describe(error)}") from error


def problem_of(work: Callable[[], object]) -> str | None:
    """Call `work` and return the message of its expected error; None if it succeeds."""
    try:
        work()
    except EXPECTED as error:
        return describe(error)
    return None


def describe(error: BaseException) -> str:
    """Return the message of the error, or its type if it has none."""
    return str(error) or type(error).__name__


def on_rank_zero(
    work: Callable[[], Any], gloo_group: dist.ProcessGroup, error_class: type[A3poError] | None = None
) -> Any:
    """Call `work` on rank 0 and return its result, a JSON value, on every rank. Collective over all ranks.

    An expected error of `work` is raised on every rank: as `error_class`, or by default as the same class of errors.py.
    """
    value, failure = None, None
    if dist.get_rank(gloo_group) == 0:
        try:
            value = work()
        except EXPECTED as error:
            failure = error
    value, told = broadcast_json([value, failure and _as_json(failure)], gloo_group)
    if told is not None:
        _raise(told, failure, error_class)
    return value


def on_all_ranks[T](
    work: Callable[[], T],
    gloo_group: dist.ProcessGroup,
    error_class: type[A3poError] | None = None,
    *,
    expected: type[Exception] | tuple[type[Exception], ...] = EXPECTED,
) -> T:
    """Call `work` on every rank and return this rank's result. Collective over all ranks.

    If `work` fails on some ranks, the error of the first of them is raised on every rank: as `error_class`, with the
    number of the rank, or by default as it is, by its class of errors.py. Errors other than `expected` end their rank.
    """
    results, failure = [], None
    try:
        results.append(work())
    except expected as error:
        failure = error
    answers = gather_json(failure and _as_json(failure), gloo_group)
    for rank, told in enumerate(answers):
        if told is not None:
            if error_class is not None:
                told = [told[0], f"rank {rank}: {told[1]}"]
            _raise(told, failure if rank == dist.get_rank(gloo_group) else None, error_class)
    return results[0]


def _as_json(error: Exception) -> list[str]:
    """Return the class of errors.py that the error belongs to, and its message."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__]
    return [kinds[0] if kinds else A3poError.__name__, describe(error)]


def _raise(told: list[str], original: Exception | None, error_class: type[A3poError] | None) -> None:
    kind, text = told
    if error_class is not None:
        raise error_class(text) from original
    if original is not None:
        raise original
    raise getattr(errors, kind)(text)

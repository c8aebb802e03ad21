"""What may go wrong in a publication, as a PublishError or as a text that the other ranks can be told."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_a3po.errors import A3poError, PublishError
from megatron_a3po.parallel.messages import broadcast_json, gather_json

EXPECTED = (A3poError, RuntimeError, OSError)
"""Of torch.distributed, HTTP and files; anything else is a mistake in the program."""


@contextmanager
def as_publish_error(what: str) -> Iterator[None]:
    try:
        yield
    except EXPECTED as error:
        raise PublishError(f"{what}: {describe(error)}") from error


def problem_of(work: Callable[[], object]) -> str | None:
    """What went wrong in `work`; None if nothing did."""
    try:
        work()
    except EXPECTED as error:
        return describe(error)
    return None


def describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


def on_rank_zero(work: Callable[[], Any], gloo_group: dist.ProcessGroup) -> Any:
    """Return on every rank what `work` returns on rank 0, a JSON value. Collective over `gloo_group`, all ranks.

    Raises PublishError on all of them where it fails.
    """
    value, problem = None, None
    if dist.get_rank() == 0:
        try:
            value = work()
        except EXPECTED as error:
            problem = describe(error)
    value, problem = broadcast_json([value, problem], gloo_group)
    if problem is not None:
        raise PublishError(problem)
    return value


def on_all_ranks[T](work: Callable[[], T], gloo_group: dist.ProcessGroup) -> T:
    """What `work` returns on this rank. Collective, as above. Raises PublishError on every rank where it fails on one,
    which is named."""
    results: list[T] = []
    problem = problem_of(lambda: results.append(work()))
    for rank, text in enumerate(gather_json(problem, gloo_group)):
        if text is not None:
            raise PublishError(f"rank {rank}: {text}")
    return results[0]

"""What may go wrong in a publication, as a PublishError or as a text that the other ranks can be told."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_a3po.errors import A3poError, PublishError

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

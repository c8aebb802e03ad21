"""What goes wrong on one rank is raised on every rank, by its class and its text."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch.distributed as dist

from megatron_a3po.errors import A3poError, CheckpointError, ConfigError, PublishError
from megatron_a3po.parallel import agreement
from megatron_a3po.parallel.agreement import on_all_ranks, on_rank_zero

GROUP = cast(dist.ProcessGroup, None)


class DetailedError(ConfigError):
    """An error of another module, which only its rank can make."""

    def __init__(self, folder: str, problem: str) -> None:
        super().__init__(f"{folder}: {problem}")


def fail_with(error: Exception) -> Callable[[], Any]:
    def work() -> Any:
        raise error

    return work


def on_two_ranks(monkeypatch: pytest.MonkeyPatch, collective: Callable[[], Any], fails: int) -> list[Exception]:
    """The errors of rank 0 and rank 1 when `collective` fails on one of them; what one tells reaches the other."""
    told: list[Any] = [None, None]
    errors: list[Exception] = []

    def exchange(rank: int, value: Any) -> list[Any]:
        told[rank] = value if rank == fails else told[rank]
        return told

    for rank in (fails, 1 - fails):
        monkeypatch.setattr(agreement.dist, "get_rank", lambda group, rank=rank: rank)
        monkeypatch.setattr(agreement, "gather_json", lambda value, group, rank=rank: exchange(rank, value))
        monkeypatch.setattr(agreement, "broadcast_json", lambda value, group, rank=rank: exchange(rank, value)[0])
        with pytest.raises((A3poError, OSError)) as caught:
            collective()
        errors.append(caught.value)
    return errors


@pytest.mark.parametrize(
    ("error", "told_class"),
    [
        (CheckpointError("full"), CheckpointError),
        (DetailedError("/a", "empty"), ConfigError),
        (OSError("lost"), A3poError),
    ],
)
def test_an_error_keeps_its_class_and_text_on_every_rank(
    error: Exception, told_class: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_all = on_two_ranks(monkeypatch, lambda: on_all_ranks(fail_with(error), GROUP), fails=0)
    on_zero = on_two_ranks(monkeypatch, lambda: on_rank_zero(fail_with(error), GROUP), fails=0)

    for own, told in (on_all, on_zero):
        assert own is error
        assert type(told) is told_class
        assert str(told) == str(error)


def test_an_error_becomes_the_class_that_the_caller_names_and_tells_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    work = fail_with(OSError("lost"))

    errors = on_two_ranks(monkeypatch, lambda: on_all_ranks(work, GROUP, PublishError), fails=1)

    assert [(type(error), str(error)) for error in errors] == [(PublishError, "rank 1: lost")] * 2


def test_an_unexpected_error_is_not_shared() -> None:
    with pytest.raises(ZeroDivisionError):
        on_all_ranks(lambda: 1 // 0, GROUP)
    with pytest.raises(OSError, match="lost"):
        on_all_ranks(fail_with(OSError("lost")), GROUP, expected=CheckpointError)

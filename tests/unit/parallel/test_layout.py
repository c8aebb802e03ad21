"""How a rank enters torch.distributed."""

import os
import resource

import pytest

from tests.support.own_process import in_own_process

SOFT, NEEDED = 128, 1600


def open_files_after_joining() -> int:
    """With a soft limit far below, as many files as a rank of a large run has."""
    from megatron_a3po.parallel.layout import RankInfo, init_distributed

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard))
    init_distributed(RankInfo(rank=0, world_size=1, local_rank=0), "cpu", 30.0)
    return len([os.dup(0) for _ in range(NEEDED)])


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * NEEDED, reason="the hard limit of open files is low here"
)
def test_a_rank_may_open_as_many_files_as_the_hard_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    assert in_own_process(open_files_after_joining) == NEEDED


def allocator_settings() -> str:
    import torch

    from megatron_a3po.parallel import layout

    layout._let_segments_grow()
    settings: str = torch._C._accelerator_getAllocatorSettings()  # type: ignore[attr-defined]
    return settings


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        (None, "", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:512", "max_split_size_mb:512"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", "expandable_segments:False"),
    ],
)
def test_segments_of_gpu_memory_grow_unless_the_user_says_otherwise(
    variable: str | None, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, value)

    assert in_own_process(allocator_settings) == expected

"""How a rank enters torch.distributed."""

import os
import resource

import pytest

from tests.support.own_process import in_fork

SOFT, NEEDED = 128, 1600


def open_files_after_joining() -> int:
    """Open as many files as a rank of a large run has, from a soft limit far below."""
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

    assert in_fork(open_files_after_joining) == NEEDED


def allocator_settings() -> tuple[str, str]:
    """Return the settings of GPU memory before and after the call."""
    import torch

    from megatron_a3po.parallel import layout

    settings = torch._C._accelerator_getAllocatorSettings  # type: ignore[attr-defined]
    before = settings()
    layout._let_segments_grow()
    return before, settings()


@pytest.mark.parametrize("variable", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_of_gpu_memory_grow_unless_the_user_says_otherwise(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "expandable_segments:False")
    before, after = in_fork(allocator_settings)

    assert "True" not in before
    assert after == (before if variable else "expandable_segments:True")

"""Take a rank of the run from torchrun's environment into torch.distributed."""

import os
import resource
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Self

import torch
import torch.distributed as dist

_OPEN_FILES = 65536
_NO_LIMIT = timedelta(days=30)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """The rank of this process. Without torchrun it is the only one."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> Self:
        """Read torchrun's variables."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )


def init_distributed(info: RankInfo, device: Literal["cuda", "cpu"], timeout_seconds: float) -> dist.ProcessGroup:
    """Join the default process group, which uses gloo for tensors on a CPU and NCCL for those on a GPU.

    Returns the `gloo_group`: a second group of all ranks, in which the others wait for rank 0. Rank 0 may wait long for
    rollout servers, so this group has no time limit. It needs none: the connections end when rank 0 ends.
    """
    _allow_open_files()
    if device == "cuda":
        _let_segments_grow()
        torch.cuda.set_device(info.local_rank)
    timeout = timedelta(seconds=timeout_seconds)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    if "MASTER_ADDR" in os.environ:
        store = _store(info, timeout)
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    gloo_group = dist.new_group(backend="gloo", timeout=_NO_LIMIT)
    assert isinstance(gloo_group, dist.ProcessGroup)
    return gloo_group


def _allow_open_files() -> None:
    """Raise the limit of open files: at 256 ranks, gloo's connections in Megatron's groups are some 1,600 per rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _let_segments_grow() -> None:
    """Use growing segments of GPU memory, unless the user has set the allocator.

    Packs differ in length, which fragments fixed segments. This is not set in the environment, because rollout servers
    would inherit it. They share memory among processes by other means.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _store(info: RankInfo, timeout: timedelta) -> dist.Store:
    """Return torchrun's store, with a prefix that hides the addresses of ranks from before a restart."""
    store, _, _ = next(dist.rendezvous("env://", info.rank, info.world_size, timeout=timeout))
    # On several nodes the restart counts may differ. There, torchrun itself has to make a new store:
    # docs/checkpoints.md, "Launchers".
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    assert isinstance(store, dist.Store)
    return store

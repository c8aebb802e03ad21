"""The ranks of a run: from torchrun's environment to torch.distributed."""

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
    """Who this process is. Without torchrun: the only rank."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> Self:
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )


def init_distributed(info: RankInfo, device: Literal["cuda", "cpu"], timeout_seconds: float) -> dist.ProcessGroup:
    """Join the default process group: gloo for tensors on the CPU, NCCL for those on a GPU.

    Returns a second group of all ranks in which they wait for rank 0, which may itself wait long for rollout servers.
    It needs no limit of its own: when rank 0 ends, its connections do.
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
    """Each of Megatron's groups connects all of its ranks by gloo too: of 256 ranks, one has some 1,600 connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _let_segments_grow() -> None:
    """Every pack has another length, which fragments fixed segments of GPU memory. The user's own settings remain.

    Not in the environment: rollout servers would inherit it, and share memory among processes by other means.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _store(info: RankInfo, timeout: timedelta) -> dist.Store:
    """torchrun's store, in which restarted ranks do not find the addresses of those that ended before."""
    store, _, _ = next(dist.rendezvous("env://", info.rank, info.world_size, timeout=timeout))
    # With several nodes the counts of the nodes may differ; there torchrun has to be told to make a new store:
    # docs/checkpoints.md, "Launchers".
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    assert isinstance(store, dist.Store)
    return store

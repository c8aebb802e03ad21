"""Measurements of a process's memory, in a process where nothing else takes any."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.support.deadlines import scaled
from tests.support.paths import ROOT

DEADLINE_SECONDS = scaled(120.0)
BARE_PACKAGE = f"""
import sys, types
sys.modules["megatron_a3po"] = types.ModuleType("megatron_a3po")
sys.modules["megatron_a3po"].__path__ = [{str(ROOT / "megatron_a3po")!r}]
"""
"""Begins a program that imports only parts of the package, which by itself imports the whole configuration."""


def in_own_process[T](function: Callable[..., T], *arguments: Any) -> T:
    """What a function of a module returns there, or raises."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result(DEADLINE_SECONDS)


def in_fork[T](function: Callable[..., T], *arguments: Any) -> T:
    """The same in a fork of this process, which has imported everything; torch computes in one thread there."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("fork"), initializer=_use_one_thread) as pool:
        return pool.submit(function, *arguments).result(DEADLINE_SECONDS)


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # the others are not there in a fork


def peak_growth(work: Callable[[], object]) -> int:
    """Return by how many bytes the memory that this process has for itself grows at most during the work.

    Pages of files, such as the code of libraries that a fork touches for the first time, do not count.
    """
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would hide what is taken now
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before, files_before = _status_bytes("VmRSS"), _status_bytes("RssFile")
    work()
    return _status_bytes("VmHWM") - before - max(_status_bytes("RssFile") - files_before, 0)


def _status_bytes(line: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0]) << 10

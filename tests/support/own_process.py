"""Processes of their own, where memory can be measured, and processes that are killed at any of their calls."""

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

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


CALLS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink")


class Killed(BaseException):
    """The process ends here: nothing of the code under test does anything after it."""


@contextmanager
def ending(patch: pytest.MonkeyPatch, at_call: int, error: BaseException | None = None) -> Iterator[list[str]]:
    """The call of that number to any of these functions raises `error`, and all later ones work again.

    Without an error the process is killed: no later call works, also not while cleaning up. The list has the names of
    the functions called.
    """
    called: list[str] = []

    def wrapped(name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            called.append(name)
            if error is None and len(called) > at_call:
                raise Killed
            if error is not None and len(called) == at_call + 1:
                raise error
            return function(*arguments, **keywords)

        return call

    with patch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, wrapped(name))
        yield called

"""Ranks that are forked from one process which has imported everything: that takes longer than most tests.

As a program it takes jobs from `launch.end_of_ranks`, a line of JSON each, and answers with a line about their end.
"""

import dataclasses
import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How the ranks of a job did."""

    codes: list[int]
    """Exit codes by rank; negative: a signal"""
    failed_first: list[int]
    """Ranks that failed before the others were killed for it"""
    is_late: bool
    """They had not ended at the deadline, and were killed"""


def import_everything() -> None:
    """Before the first fork. Starts no thread, which a forked rank would lack."""
    import torch

    from megatron_a3po import cpu

    cpu.install()
    torch.set_num_threads(1)
    import megatron_a3po.actor.actor
    import megatron_a3po.train  # noqa: F401

    gc.freeze()  # a collection in a rank would look at all that was imported, and copy its memory
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in the forked ranks"


def serve_jobs() -> None:
    """Answer each line of JSON on stdin with how its ranks ended, until stdin ends or the parent is gone."""
    from megatron_a3po.runtime.processes import die_with_parent

    die_with_parent(signal.SIGKILL)
    import_everything()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(run(json.loads(line)))), flush=True)


def run(job: Mapping[str, Any]) -> Ended:
    """Run the ranks of a job. When one has failed the others are killed, as when their machine goes."""
    ranks = {_fork(job, rank): rank for rank in range(job["world_size"])}
    codes: dict[int, int] = {}
    failed_first: list[int] = []
    deadline, is_late = time.monotonic() + job["timeout_seconds"], False
    while ranks:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            codes[ranks.pop(ended)] = os.waitstatus_to_exitcode(status)
            continue
        failed_first = failed_first or [rank for rank, code in codes.items() if code]
        is_late = is_late or time.monotonic() > deadline
        if failed_first or is_late:
            for process in ranks:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    failed_first = failed_first or [rank for rank, code in codes.items() if code]
    return Ended(codes=[code for _, code in sorted(codes.items())], failed_first=failed_first, is_late=is_late)


def _fork(job: Mapping[str, Any], rank: int) -> int:
    """The process id, in the parent."""
    from megatron_a3po.runtime.processes import die_with_parent, end_process

    if process := os.fork():
        return process
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        output = os.open(f"{job['log']}.rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(output, number)
        os.environ.clear()
        os.environ.update(job["environment"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        runpy.run_path(job["path"])[job["name"]](*job["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
    end_process(code)


if __name__ == "__main__":
    serve_jobs()

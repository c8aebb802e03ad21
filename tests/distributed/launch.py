"""Run one function on several processes as torch.distributed ranks, with a deadline."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_a3po.runtime.processes import free_port
from tests.distributed.forks import Ended
from tests.support.deadlines import scaled
from tests.support.paths import ROOT

RANK_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def run_ranks(
    function: Callable[..., None],
    world_size: int,
    *arguments: str,
    timeout_seconds: float = 120.0,
    with_gpus: bool = False,
) -> str:
    """Call `function(*arguments)` in `world_size` processes of their own; return what rank 0 printed.

    Raises:
        AssertionError: a rank failed or the deadline passed. The message has the output of the ranks that failed
            first; their siblings, which would wait for them in a collective, are killed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        log = Path(directory) / "log"
        ended = end_of_ranks(function, world_size, *arguments, log=log, timeout=timeout_seconds, with_gpus=with_gpus)
        late = [rank for rank, code in enumerate(ended.codes) if code == -signal.SIGKILL] if ended.is_late else []
        failures = [f"rank {rank} ended with {ended.codes[rank]}" for rank in ended.failed_first if rank not in late]
        failures += [f"rank {rank} passed the deadline" for rank in late]
        assert not failures, "; ".join(failures) + "".join(
            f"\n--- rank {rank} ---\n{output_of(log, rank)[-4000:]}" for rank in {*ended.failed_first, *late}
        )
        return output_of(log, 0)


def end_of_ranks(
    function: Callable[..., None],
    world_size: int,
    *arguments: str,
    log: Path,
    timeout: float,
    with_gpus: bool = False,
) -> Ended:
    """Call `function(*arguments)` in `world_size` processes, which write to `LOG.rankN`; return how they ended.

    The processes find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in their environment, as under
    torchrun. `with_gpus`: fresh processes; else forks of one where the CPU's modules are installed (`forks.py`), which
    see no GPU. The function must live at the top level of its module, which must be importable by path.
    """
    job = {
        "path": str(sys.modules[function.__module__].__file__),
        "name": function.__name__,
        "arguments": arguments,
        "world_size": world_size,
        "environment": _environment() | {"WORLD_SIZE": str(world_size), "MASTER_PORT": str(free_port())},
        "log": str(log),
        "timeout_seconds": scaled(timeout),
    }
    return _spawn(job) if with_gpus else _fork(job)


def output_of(log: Path, rank: int) -> str:
    """Return what a rank has written so far."""
    return Path(f"{log}.rank{rank}").read_text(errors="replace")


def _environment() -> dict[str, str]:
    environment = os.environ | RANK_ENVIRONMENT
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process compiles all of Megatron again
    return environment


def _fork(job: dict[str, Any]) -> Ended:
    program = forking_program()
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write(json.dumps(job | {"environment": job["environment"] | {"CUDA_VISIBLE_DEVICES": ""}}) + "\n")
    program.stdin.flush()
    return Ended(**json.loads(program.stdout.readline()))


@functools.cache
def forking_program() -> subprocess.Popen[str]:
    """Start what forks ranks, once for all tests and one job at a time. It ends with the thread that starts it."""
    command = [sys.executable, "-m", "tests.distributed.forks"]
    environment = _environment() | {"CUDA_VISIBLE_DEVICES": ""}
    program = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None and program.stdout.readline() == "ready\n"
    return program


def _spawn(job: dict[str, Any]) -> Ended:
    """Forks would share the parent's CUDA context, and have the CPU's modules."""
    command = [sys.executable, __file__, job["path"], job["name"], *job["arguments"]]
    ranks = []
    try:
        for rank in range(job["world_size"]):
            with Path(f"{job['log']}.rank{rank}").open("wb") as output:
                own = job["environment"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=own, stdout=output, stderr=subprocess.STDOUT))
        return _wait(ranks, time.monotonic() + job["timeout_seconds"])
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def end_model_parallel() -> None:
    """End all of Megatron's process groups, so that this process can build a model in another layout.

    Megatron itself only forgets them: their threads, some twenty for each group, would go on polling.
    """
    import gc

    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> Ended:
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        is_late = time.monotonic() > deadline
        if failed or is_late or None not in codes:
            ended = [-signal.SIGKILL if code is None else code for code in codes]
            return Ended(codes=ended, failed_first=failed, is_late=is_late)
        time.sleep(0.05)


def _main() -> None:
    import runpy

    from megatron_a3po.runtime.processes import end_process

    path, name, *arguments = sys.argv[1:]
    runpy.run_path(path)[name](*arguments)
    end_process(0)


if __name__ == "__main__":
    _main()

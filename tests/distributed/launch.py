"""Run one function on several processes as torch.distributed ranks, with a deadline."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megatron_a3po.runtime.processes import free_port

ROOT = Path(__file__).resolve().parents[2]

RANK_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def run_ranks(
    function: Callable[..., None],
    world_size: int,
    *arguments: str,
    timeout_seconds: float = 120.0,
    with_gpus: bool = False,
) -> str:
    """Call `function(*arguments)` in `world_size` fresh Python processes; return what rank 0 printed.

    The processes find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in their environment, as under
    torchrun. They see no GPU unless `with_gpus`. The function must live at the top level of its module, which must be
    importable by path.

    Raises:
        AssertionError: a rank failed or the deadline passed. The message has the output of the ranks that failed
            first; their siblings, which would wait for them in a collective, are killed.
    """
    module = sys.modules[function.__module__].__file__
    command = [sys.executable, __file__, str(module), function.__name__, *arguments]
    environment = os.environ | RANK_ENVIRONMENT | {"WORLD_SIZE": str(world_size), "MASTER_PORT": str(free_port())}
    if not with_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every rank compiles all of Megatron again
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        logs = [Path(directory) / f"rank{rank}.log" for rank in range(world_size)]
        ranks = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as output:
                    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    ranks.append(
                        subprocess.Popen(command, env=environment | own, stdout=output, stderr=subprocess.STDOUT)
                    )
            failure = _wait(ranks, time.monotonic() + timeout_seconds)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        assert not failure, failure + "".join(
            f"\n--- rank {rank} ---\n{log.read_text(errors='replace')[-4000:]}"
            for rank, log in enumerate(logs)
            if f"rank {rank} " in failure
        )
        return logs[0].read_text(errors="replace")


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


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> str:
    """Wait for all ranks; a description of what went wrong, empty if nothing did."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
        if failed:
            return "; ".join(failed)
        if None not in codes:
            return ""
        if time.monotonic() > deadline:
            return "; ".join(f"rank {rank} passed the deadline" for rank, code in enumerate(codes) if code is None)
        time.sleep(0.05)


def _main() -> None:
    import runpy

    from megatron_a3po.runtime.processes import end_process

    path, name, *arguments = sys.argv[1:]
    runpy.run_path(path)[name](*arguments)
    end_process(0)


if __name__ == "__main__":
    _main()

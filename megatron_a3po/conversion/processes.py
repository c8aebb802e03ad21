"""The processes of a conversion: one, or several under torchrun that divide the files among them."""

import argparse
import importlib.util
import logging
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron_a3po.errors import A3poError
from megatron_a3po.parallel.layout import RankInfo, init_distributed
from megatron_a3po.parallel.messages import gather_json
from megatron_a3po.runtime.processes import die_with_parent, end_process

_LET_RANK_ZERO_SPEAK_SECONDS = 3.0
_BUILDING_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """This process among those that convert together."""

    rank: int
    world_size: int
    group: dist.ProcessGroup
    """all of them, gloo; waiting in it has no limit"""

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """Every n-th of the items, from this rank's number on."""
        return items[self.rank :: self.world_size]

    def gather(self, value: Any) -> list[Any]:
        """The values (JSON) of all ranks in their order. Collective, so also a barrier."""
        return gather_json(value, self.group)

    def on_rank_zero(self, work: Callable[[], Any]) -> Any:
        """Call `work` on rank 0 when all ranks are here; its result (JSON) on all. If it fails, all raise its error."""
        self.gather(None)
        result, failure = None, None
        if self.rank == 0:
            try:
                result = work()
            except (A3poError, OSError) as error:
                failure = error
        [[result, message], *_] = self.gather([result, None if failure is None else str(failure)])
        if failure is not None:
            raise failure
        if message is not None:
            raise A3poError(message)
        return result

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    @contextmanager
    def progress(self, what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
        """A bar on rank 0's stderr for its share of the work; it is given the bytes that were done."""
        of_all = f" (process 1 of {self.world_size})" if self.world_size > 1 else ""
        interval = 0.5 if sys.stderr.isatty() else 10.0
        with tqdm(
            desc=f"{what}{of_all}",
            total=total_bytes,
            unit="B",
            unit_scale=True,
            mininterval=interval,
            disable=self.rank != 0,
        ) as bar:
            yield bar.update

    def say_written(self, target: Path) -> None:
        """Also how much memory the largest of the processes used. Collective."""
        peak = max(self.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
        self.say(f"{target}: written, with at most {peak / 2**30:.2f} GiB of memory in a process")


def choose_modules() -> Literal["cpu", "cuda"]:
    """Whose modules models are built of here, by their device; to be called before anything imports Megatron.

    Transformer Engine makes modules only where there is a GPU. Elsewhere it is as if it were not installed, and those
    for the CPU are taken, whose parameters have the same names and shapes. Raises ConfigError.
    """
    is_installed = importlib.util.find_spec("transformer_engine") is not None
    if is_installed and torch.cuda.is_available():
        return "cuda"
    from megatron_a3po import cpu

    hidden: dict[str, Any] = {"transformer_engine": None} if is_installed else {}
    sys.modules.update(hidden)
    cpu.install()
    sys.modules.update(hidden)  # installing ends with what it found on the disk
    return "cpu"


def start_processes() -> Processes:
    """Join the other processes, and make Megatron ready for a model on one rank, whose weights stay on the host.

    Raises ConfigError.
    """
    choose_modules()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    info = RankInfo.from_environment()
    group = init_distributed(info, "cpu", _BUILDING_TIMEOUT_SECONDS)

    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(1, 1, expert_tensor_parallel_size=1, create_gloo_process_groups=False)
    return Processes(rank=info.rank, world_size=info.world_size, group=group)


def run_tool(parser: argparse.ArgumentParser, convert: Callable[[argparse.Namespace, Processes], None]) -> NoReturn:
    """The whole of a command: arguments, processes, errors as messages, exit code (0, 1, or 2 for a wrong use)."""
    arguments = parser.parse_args()
    die_with_parent()
    try:
        processes = start_processes()
    except A3poError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        end_process(1)
    try:
        convert(arguments, processes)
    except (A3poError, OSError) as error:
        # Most often all ranks found the same; torchrun ends the others as soon as one has ended.
        if processes.rank > 0:
            time.sleep(_LET_RANK_ZERO_SPEAK_SECONDS)
        print(f"error: {error}", file=sys.stderr, flush=True)
        end_process(1)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it was", file=sys.stderr, flush=True)
        end_process(130)
    end_process(0)

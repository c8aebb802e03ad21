"""The processes of a conversion: one, or several under torchrun, which divide the files among them."""

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
from megatron_a3po.parallel.agreement import on_rank_zero
from megatron_a3po.parallel.layout import RankInfo, init_distributed
from megatron_a3po.parallel.messages import gather_json
from megatron_a3po.runtime.processes import die_with_parent, end_process

_LET_RANK_ZERO_SPEAK_SECONDS = 3.0
_BUILDING_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """The processes that convert together, seen from one of them."""

    rank: int
    world_size: int
    group: dist.ProcessGroup
    """the gloo group of all of them, without a timeout"""

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return this rank's share: every n-th of the items, from the rank's number on."""
        return items[self.rank :: self.world_size]

    def gather(self, value: Any) -> list[Any]:
        """Return the values (JSON) of all ranks in their order. Collective, so also a barrier."""
        return gather_json(value, self.group)

    def on_rank_zero(self, work: Callable[[], Any]) -> Any:
        """Call `work` on rank 0 once all ranks are here, and return its result (JSON) on all. All raise its error."""
        self.gather(None)
        return on_rank_zero(work, self.group)

    def say(self, text: str) -> None:
        """Print the text on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    @contextmanager
    def progress(self, what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
        """Show a progress bar on rank 0's stderr for its share; yields a function that takes the bytes done."""
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
        """Print that the target is written, and the most memory that a process used. Collective."""
        peak = max(self.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
        self.say(f"{target}: written, with at most {peak / 2**30:.2f} GiB of memory in a process")


def choose_modules() -> Literal["cpu", "cuda"]:
    """Choose the modules that models are built of, and return their device. Call it before Megatron is imported.

    Transformer Engine makes modules only on a GPU. Elsewhere it is hidden, and modules for the CPU are installed, whose
    parameters have the same names and shapes. Raises ConfigError.
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
    """Join the other processes, and prepare Megatron for a model on one rank, on the host. Raises ConfigError."""
    choose_modules()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    info = RankInfo.from_environment()
    group = init_distributed(info, "cpu", _BUILDING_TIMEOUT_SECONDS)

    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(1, 1, expert_tensor_parallel_size=1, create_gloo_process_groups=False)
    return Processes(rank=info.rank, world_size=info.world_size, group=group)


def run_tool(parser: argparse.ArgumentParser, convert: Callable[[argparse.Namespace, Processes], None]) -> NoReturn:
    """Run a command: parse arguments, start processes, print errors, end with exit code 0, 1 or 2 (wrong usage)."""
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
        # All ranks have the same error most often; torchrun ends the others as soon as one has ended.
        if processes.rank > 0:
            time.sleep(_LET_RANK_ZERO_SPEAK_SECONDS)
        print(f"error: {error}", file=sys.stderr, flush=True)
        end_process(1)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr, flush=True)
        end_process(130)
    end_process(0)

"""Reward functions as users write them, good and bad ones. Workers import them by name."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_a3po.rewards.types import Sample

NO_FUNCTION = 3


def length(sample: Sample) -> float:
    return float(len(sample.response))


def with_reason(sample: Sample) -> tuple[float, str]:
    return (1.0, "even") if len(sample.response) % 2 == 0 else (0.0, "odd")


async def slow_length(sample: Sample) -> int:
    await asyncio.sleep(0.01)
    return len(sample.response)


def rank_in_group(samples: Sequence[Sample]) -> list[float]:
    return [float(sorted(len(other.response) for other in samples).index(len(s.response))) for s in samples]


async def slow_rank_in_group(samples: Sequence[Sample]) -> list[float]:
    await asyncio.sleep(0.01)
    return rank_in_group(samples)


def everything(sample: Sample) -> tuple[float, str]:
    """Return 1 if the whole sample has arrived."""
    known = (sample.prompt_id, sample.prompt, sample.answer, sample.row, sample.num_tokens, sample.truncated)
    return float(known == ("p/1", "What?", "42", {"level": (5, 6)}, 7, True)), "seen"


def environment(sample: Sample) -> float:
    """Print, and return 1 if the standard input is empty and no GPU is visible."""
    print("hello from a reward function")
    return float(os.read(0, 10) == b"" and os.environ["CUDA_VISIBLE_DEVICES"] == "")


def process(sample: Sample) -> int:
    """Return the process that scores."""
    return os.getpid()


def terminate(sample: Sample) -> float:
    """Return 1 if SIGTERM ends the processes that this one starts, however early it comes."""
    program = subprocess.Popen(["sleep", "600"])
    program.terminate()
    codes = {program.wait()}
    for _ in range(100):
        if (fork := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        os.kill(fork, signal.SIGTERM)
        codes.add(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))
    return float(codes == {-signal.SIGTERM})


def bad(sample: Sample) -> Any:
    """Do what the response says."""
    action, _, argument = sample.response.partition(" ")
    return globals()[f"_{action}"](argument)


def _fine(argument: str) -> float:
    return 1.0


def _hang(argument: str) -> None:
    while True:
        pass


def _sleep(argument: str) -> None:
    time.sleep(600)


def _raise(argument: str) -> None:
    raise ZeroDivisionError("in the user's code")


def _leave(argument: str) -> None:
    raise SystemExit(0)


def _die(argument: str) -> None:
    os.kill(os.getpid(), int(argument))


def _eat(argument: str) -> None:
    blocks = []
    while True:
        blocks.append(bytearray(64 * 1024 * 1024))


def _return(argument: str) -> Any:
    return float(argument)


def _fork(argument: str) -> float:
    """Fork; the child returns into the worker, as if it were the worker."""
    os.fork()
    return 1.0


def _daemons(argument: str) -> None:
    """Leave processes behind in every way, write their pids to a file, and hang."""
    pids = Path(argument)
    program = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(600)"
    subprocess.Popen(["python3", "-c", program])
    subprocess.Popen(["python3", "-c", program], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with pids.open("a") as file:
                file.write(f"{os.getpid()} ")
            time.sleep(600)
        os._exit(0)
    while len(pids.read_text().split() if pids.exists() else []) < 3:
        time.sleep(0.01)
    time.sleep(600)


def wrong_for_odd_rows(sample: Sample) -> tuple[float, str]:
    """Raise for one prompt, and give 1 to the others whose number is even."""
    number = int(sample.prompt_id.split("/")[1])
    if number == sample.row["broken"]:
        raise ValueError("no reward for this one")
    return (1.0, "even") if number % 2 == 0 else (0.0, "odd")

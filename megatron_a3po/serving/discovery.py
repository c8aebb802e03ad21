"""How a run finds the rollout servers that launchers have started elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from megatron_a3po.errors import RolloutError
from megatron_a3po.serving.registry import Registration, read_registrations

_LOOK_SECONDS = 1.0
_HEARTBEAT_SECONDS = 20.0


async def find_servers(
    folder: Path,
    number: int,
    *,
    problem_of: Callable[[str], Awaitable[str | None]],
    timeout_seconds: float,
    say: Callable[[str], None],
) -> list[str]:
    """URLs of all registered servers that answer, once there are `number` of them.

    `problem_of` says why a URL gives no usable answer, `say` is told how it goes. Raises RolloutError after
    `timeout_seconds`, with what is missing.
    """
    loop = asyncio.get_running_loop()
    deadline, next_message = loop.time() + timeout_seconds, loop.time()
    while True:
        registrations, unreadable = _read(folder)
        problems = await asyncio.gather(*(problem_of(item.url) for item in registrations))
        found = list(zip(registrations, problems, strict=True))
        answering = [item.url for item, problem in found if problem is None]
        if len(answering) >= number:
            return answering
        others = unreadable + "".join(
            f"\n  {item.url} (process {item.process_id} on {item.host}, since {item.started_at}): {problem}"
            for item, problem in found
            if problem is not None
        )
        if loop.time() >= deadline:
            raise RolloutError(
                f"{len(answering)} of rollout.num_servers = {number} servers that are registered in {folder} answered "
                f"within {timeout_seconds:g} s; start more by tools/launch_rollout_servers.py with the configuration "
                f"of this run, or raise rollout.start_timeout_seconds{others}"
            )
        if loop.time() >= next_message:
            say(f"waiting for rollout servers that register in {folder}: {len(answering)} of {number} answer{others}")
            next_message = loop.time() + _HEARTBEAT_SECONDS
        await asyncio.sleep(_LOOK_SECONDS)


def _read(folder: Path) -> tuple[list[Registration], str]:
    """And why there are none, where the folder cannot be read now."""
    try:
        return read_registrations(folder), ""
    except OSError as error:
        return [], f"\n  it cannot be read: {error}"

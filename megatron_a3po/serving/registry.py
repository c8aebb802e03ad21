"""The register of rollout servers: one small file per server in `run_dir/servers`, on shared storage."""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, field_validator

from megatron_a3po.errors import RolloutError
from megatron_a3po.runtime.files import write_durably
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.waiting import wait_until_async

_URL = re.compile(r"https?://([\w.-]+|\[[\da-f:.]+\]):\d+", re.ASCII | re.IGNORECASE)


class Registration(BaseModel):
    """What a launcher says of one server."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    url: str
    model: str
    tensor_parallel: int
    host: str
    """Name of the machine, as it calls itself"""
    process_id: PositiveInt
    """Process of the server on that machine"""
    started_at: str
    """ISO 8601, UTC"""

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        if not _URL.fullmatch(url) or not urlsplit(url).port:
            raise ValueError("not http://host:port")
        return url


def servers_folder(run_dir: Path) -> Path:
    """Return the folder of a run in which servers register."""
    return run_dir / "servers"


def register(folder: Path, registration: Registration) -> None:
    """Write the registration of a server, in the place of an earlier one of the same URL."""
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(_file(folder, registration.url), registration.model_dump_json(indent=2) + "\n")


def deregister(folder: Path, url: str) -> None:
    """Remove the registration of a server, if there is one."""
    _file(folder, url).unlink(missing_ok=True)


def read_registrations(folder: Path) -> list[Registration]:
    """Return the registrations in the folder, one of each URL and in the order of the URLs.

    A file that is no registration is reported and left out. A folder that is not there has none. Raises OSError where
    the folder cannot be read.
    """
    found = {registration.url: registration for registration in _read(folder).values()}
    return [found[url] for url in sorted(found)]


def remove_ended(folder: Path) -> list[str]:
    """Remove what servers of this machine left that were killed together with their launcher; return their URLs.

    Files that cannot be read or removed now are reported.
    """
    host = socket.gethostname()
    try:
        found = _read(folder).items()
    except OSError as error:
        logger.warning("the registrations in %s cannot be read: %s", folder, error)
        return []
    ended = {file: item for file, item in found if item.host == host and not _is_running(item.process_id)}
    for file in ended:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be removed: %s", file, error)
    return sorted(item.url for item in ended.values())


async def find_servers(
    folder: Path,
    number: int,
    *,
    problem_of: Callable[[str], Awaitable[str | None]],
    timeout_seconds: float,
    say: Callable[[str], None],
) -> list[str]:
    """Return the URLs of all registered servers that answer, once there are `number` of them.

    problem_of: returns why a URL gives no usable answer, None if it does. say: told how it goes. Raises RolloutError
    after `timeout_seconds`, with what is missing.
    """
    num_answering, others, is_first = 0, "", True

    async def look() -> list[str] | None:
        nonlocal num_answering, others, is_first
        registrations, unreadable = _try_to_read(folder)
        problems = await asyncio.gather(*(problem_of(item.url) for item in registrations))
        found = list(zip(registrations, problems, strict=True))
        answering = [item.url for item, problem in found if problem is None]
        others = unreadable + "".join(
            f"\n  {item.url} (process {item.process_id} on {item.host}, since {item.started_at}): {problem}"
            for item, problem in found
            if problem is not None
        )
        num_answering = len(answering)
        if num_answering >= number:
            return answering
        if is_first:
            remind()
            is_first = False
        return None

    def remind() -> None:
        say(f"waiting for rollout servers that register in {folder}: {num_answering} of {number} answer{others}")

    try:
        return await wait_until_async(look, timeout_seconds, look_seconds=1.0, remind=remind)
    except TimeoutError:
        raise RolloutError(
            f"{num_answering} of rollout.num_servers = {number} servers that are registered in {folder} "
            f"answered within {timeout_seconds:g} s; start more by tools/launch_rollout_servers.py with the "
            f"configuration of this run, or raise rollout.start_timeout_seconds{others}"
        ) from None


def _try_to_read(folder: Path) -> tuple[list[Registration], str]:
    """Return the registrations, or none and the reason where the folder cannot be read now."""
    try:
        return read_registrations(folder), ""
    except OSError as error:
        return [], f"\n  it cannot be read: {error}"


def _read(folder: Path) -> dict[Path, Registration]:
    found = {}
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".json")
    except FileNotFoundError:
        return {}
    for file in files:
        with suppress(OSError):  # it may have been removed meanwhile
            if not file.is_file():  # a FIFO would be waited for
                continue
            try:
                found[file] = Registration.model_validate_json(file.read_bytes())
            except ValidationError as error:
                logger.warning("%s is no registration of a rollout server; remove it: %s", file, error)
    return found


def _file(folder: Path, url: str) -> Path:
    parts = urlsplit(url)
    return folder / f"{parts.hostname}_{parts.port}.json"


def _is_running(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

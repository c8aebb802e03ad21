"""Where rollout servers say that they are there: one small file per server in `run_dir/servers`, on shared storage."""

import re
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, field_validator

from megatron_a3po.runtime.files import write_durably
from megatron_a3po.runtime.logging import logger

_URL = re.compile(r"https?://([\w.-]+|\[[\da-f:.]+\]):\d+", re.ASCII | re.IGNORECASE)


class Registration(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    url: str
    model: str
    tensor_parallel: int
    host: str
    """As the machine calls itself"""
    process_id: PositiveInt
    """Of the server, on that machine"""
    started_at: str
    """ISO 8601, UTC"""

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        if not _URL.fullmatch(url) or not urlsplit(url).port:
            raise ValueError("not http://host:port")
        return url


def servers_folder(run_dir: Path) -> Path:
    return run_dir / "servers"


def register(folder: Path, registration: Registration) -> None:
    """Takes the place of an earlier registration of the same URL."""
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(_file(folder, registration.url), registration.model_dump_json(indent=2) + "\n")


def deregister(folder: Path, url: str) -> None:
    _file(folder, url).unlink(missing_ok=True)


def read_registrations(folder: Path) -> list[Registration]:
    """Those of the folder, one of each URL and in order of them; a file that is none is reported and left out. Raises
    OSError where the folder cannot be read; before the first registration, there may be none."""
    found = {registration.url: registration for registration in _read(folder).values()}
    return [found[url] for url in sorted(found)]


def remove_ended(folder: Path) -> list[str]:
    """Take back what servers of this machine have left that were killed together with their launcher; their URLs.
    What cannot be read or removed now is reported."""
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


def _read(folder: Path) -> dict[Path, Registration]:
    found = {}
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".json")
    except FileNotFoundError:
        return {}
    for file in files:
        with suppress(OSError):  # taken back meanwhile
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

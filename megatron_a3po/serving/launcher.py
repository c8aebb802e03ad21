"""Keep the rollout servers of one machine running for a run elsewhere: start, register and restart them."""

import http.client
import ipaddress
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from megatron_a3po.config import RunConfig
from megatron_a3po.config.server_key import KEY_VARIABLE
from megatron_a3po.errors import ConfigError, RolloutError
from megatron_a3po.runtime.processes import free_port
from megatron_a3po.runtime.run_dir import make_log_folder
from megatron_a3po.serving.local_server import LocalServer, server_arguments
from megatron_a3po.serving.registry import Registration, deregister, register, servers_folder

MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 1800.0
"""A server that ends more often than MAX_RESTARTS within this time, or cannot be restarted for so long, is given up."""
_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 2.0

type MakeServer = Callable[[int | None], LocalServer]
"""Makes a server at a port; None stands for a free one."""


def check_host(host: str, key: str | None) -> None:
    """Check that servers may be bound to an address. Raises ConfigError when they cannot, or must not without a key."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET)
        addresses = [ipaddress.ip_address(str(entry[4][0])) for entry in found]
        with socket.create_server((host, 0)):
            pass
    except OSError as error:
        raise ConfigError(f"--host {host}: no IPv4 address or name of this machine ({error})") from None
    if any(address.is_unspecified for address in addresses):
        raise ConfigError(f"--host {host}: give the one address of this machine at which the trainer finds the servers")
    literal = ("localhost", *map(str, addresses))
    if host not in literal and any(address.is_loopback for address in addresses):
        raise ConfigError(
            f"--host {host}: is {', '.join(map(str, addresses))} on this machine, which no other one reaches; give the "
            "address itself"
        )
    if key is None and not all(address.is_loopback for address in addresses):
        raise ConfigError(
            f"--host {host}: without a key, everybody who reaches this address could read and replace the weights; "
            f"make one with `openssl rand -hex 32`, and give it to the launcher and the run, in {KEY_VARIABLE} or in a "
            "file (mode 0600) as `rollout.key_file`"
        )


def share_gpus(gpus: Sequence[str], per_server: int) -> list[Sequence[str]]:
    """Return the GPUs of each server. Raises ConfigError where they do not divide into servers."""
    if not gpus or len(gpus) % per_server:
        raise ConfigError(
            f"{len(gpus)} GPUs{f' ({",".join(gpus)})' if gpus else ''} do not make servers of "
            f"rollout.server_tensor_parallel = {per_server}; give a multiple of {per_server} as --gpus"
        )
    return [gpus[start : start + per_server] for start in range(0, len(gpus), per_server)]


def server_maker(config: RunConfig, *, gpus: Sequence[str] | None, host: str, key: str | None) -> MakeServer:
    """Return a function that makes servers as the configuration says.

    gpus: None stands for the CPU. Raises ConfigError where the folder of the run cannot be made.
    """
    logs, arguments = make_log_folder(config.run_dir), server_arguments(config.rollout)
    model = config.model.absolute()  # whoever asks the server may run in another folder

    def make(port: int | None) -> LocalServer:
        port = free_port(host) if port is None else port
        log_file = logs / f"rollout_server_{host}_{port}.log"
        return LocalServer(model, log_file, arguments, gpus=gpus, host=host, port=port, key=key)

    return make


class KeptServer:
    """A server that is registered while it runs and restarted when it has ended. A context manager.

    What a folder does not allow at one time, for example because a disk is full, is reported once and tried again. The
    server is given up when it cannot be started at first, or not for RESTART_WINDOW_SECONDS later on.
    """

    def __init__(
        self, make_server: MakeServer, config: RunConfig, *, key: str | None, say: Callable[[str], None]
    ) -> None:
        self.is_given_up = False
        self._make_server, self._config, self._key, self._say = make_server, config, key, say
        self._folder = servers_folder(config.run_dir)
        self._is_registered = False
        self._restarts: list[float] = []
        self._server: LocalServer | None = None
        self._address: tuple[str, int] | None = None
        """The address at which the server ran before"""
        self._ended: set[str] = set()
        """URLs whose registrations are to be removed"""
        self._failing: set[str] = set()

    def __enter__(self) -> Self:
        """Start the server. Raises RolloutError when it cannot be started."""
        try:
            self._start()
        except OSError as error:
            raise RolloutError(f"a rollout server could not be started: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def look(self) -> None:
        """Do what is due: register the server when it is ready, restart it when it has ended."""
        self._take_back()
        if self.is_given_up:
            return
        if (server := self._server) is None:
            self._start_again()
            return
        problem = server.describe_death()
        if problem is None and not self._is_registered:
            if self._is_ready(server):
                self._register(server)
            elif time.monotonic() > self._deadline:
                seconds = self._config.rollout.start_timeout_seconds
                problem = (
                    f"the rollout server at {server.url} is not ready within rollout.start_timeout_seconds = "
                    f"{seconds:g}; its log is {server.log_file}"
                )
        if problem is not None:
            self._restart(server, problem)

    def _start(self) -> None:
        port = self._address[1] if self._address is not None and _is_free(*self._address) else None
        self._server = self._make_server(port).__enter__()
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._deadline = time.monotonic() + self._config.rollout.start_timeout_seconds
        self._say(f"starting a rollout server at {self._server.url}, log {self._server.log_file}")

    def _start_again(self) -> None:
        failure = "a rollout server could not be started"
        with self._trying(failure):
            self._start()
        if self._server is None and time.monotonic() - self._restarts[-1] >= RESTART_WINDOW_SECONDS:
            self.is_given_up = True
            self._say(f"{failure} for {RESTART_WINDOW_SECONDS:g} s; it is given up")

    def _stop(self) -> None:
        if self._server is not None:
            self._ended.add(self._server.url)
        self._take_back()
        self._is_registered = False
        if self._server is not None:
            self._server.__exit__(None, None, None)
            self._server = None

    def _take_back(self) -> None:
        for url in sorted(self._ended):
            with self._trying(f"the registration of {url} could not be taken back"):
                deregister(self._folder, url)
                self._ended.remove(url)

    @contextmanager
    def _trying(self, failure: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if failure not in self._failing:
                self._say(f"{failure}, and every {_LOOK_SECONDS:g} s it is tried again: {error}")
            self._failing.add(failure)
        else:
            self._failing.discard(failure)

    def _restart(self, server: LocalServer, problem: str) -> None:
        self._stop()
        now = time.monotonic()
        self._restarts = [moment for moment in self._restarts if now - moment < RESTART_WINDOW_SECONDS]
        if len(self._restarts) == MAX_RESTARTS:
            self.is_given_up = True
            self._say(f"{problem}; it is given up after {MAX_RESTARTS} restarts within {RESTART_WINDOW_SECONDS:g} s")
            return
        self._restarts.append(now)
        self._say(f"{problem}; it is started again")
        self._address = server.host, server.port
        self._start_again()

    def _register(self, server: LocalServer) -> None:
        registration = Registration(
            url=server.url,
            model=str(server.model),
            tensor_parallel=self._config.rollout.server_tensor_parallel,
            host=socket.gethostname(),
            process_id=server.process_id,
            started_at=self._started_at,
        )
        with self._trying(f"the rollout server at {server.url} could not be registered"):
            register(self._folder, registration)
            self._is_registered = True
            self._ended.discard(server.url)
        if not self._is_registered:
            return
        where = "the CPU" if server.gpus is None else f"GPU {','.join(server.gpus)}"
        self._say(f"the rollout server at {server.url} is ready: {self._config.model}, on {where}")

    def _is_ready(self, server: LocalServer) -> bool:
        if _status(f"{server.url}/ready") != 200:
            return False
        if self._key is not None and _status(f"{server.url}/model_info") == 200:
            raise RolloutError(
                f"{server.url} answers without the key; remove from rollout.server_arguments what makes it do so"
            )
        return True


def keep_running(servers: Sequence[KeptServer], stop: threading.Event) -> bool:
    """Keep the servers running until `stop` is set, or until every server is given up.

    Returns True in the first case. At the end no server runs or is registered. Call it in the main thread: a server
    ends when the thread that started it does.
    """
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        while not stop.wait(_LOOK_SECONDS):
            for server in servers:
                server.look()
            if all(server.is_given_up for server in servers):
                return False
    return True


def _is_free(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_server((host, port)):
        return True
    return False


def _status(url: str) -> int:
    """Return the status of a GET without the key; 0 without an answer."""
    # Without the proxies of the environment, which know nothing of this machine's servers.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_ANSWER_SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return 0

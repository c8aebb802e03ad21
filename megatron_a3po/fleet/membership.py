"""What the run knows of each rollout server, and whether that is enough to go on. Lives in the pool's event loop."""

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence

from megatron_a3po.errors import RolloutError, RolloutServerDied
from megatron_a3po.fleet.client import SGLangClient
from megatron_a3po.fleet.lease import Lease
from megatron_a3po.fleet.protocol import GenerateResponse, ServerInfo, version_label
from megatron_a3po.runtime.logging import logger

_MAX_SKIPPED = 31


class Quarantined(RolloutError):
    """The server was put into quarantine before it had answered."""


class Server:
    """One rollout server. Only `ServerStates` changes what is said here of its weights and its quarantine."""

    def __init__(self, client: SGLangClient, run: str | None = None) -> None:
        """run: who publishes, in the labels of its weights."""
        self.client = client
        self.lease = Lease(client)
        self._run = run
        self.info: ServerInfo | None = None
        """As the server described itself when the run met it, or met it again"""
        self.version: int | None = None
        """The last version that it was confirmed to hold as a whole; None: none since the run met it."""
        self.is_whole = False
        """`version` is what it holds: no part of another one has been sent to it since"""
        self.error: RolloutError | None = None
        """Why it is in quarantine, if it is"""
        self.is_suspect = False
        """A connection to it was lost: another process may answer there by now."""
        self.calls = asyncio.Lock()
        """Control calls go one after the other: what undoes a call must not overtake it."""
        self.call: asyncio.Task[object] | None = None
        """The control call under way"""
        self.groups: list[str] = []
        """Names of the update groups that it was asked to join, and has not answered yet to have left"""
        self.failures = 0
        """Quarantines, until it has answered a request and then received another version"""
        self.has_answered = False
        """A response of it was accepted since it takes part."""
        self.heard = -math.inf
        """When it last gave a response, or was first asked for one, by the clock of `ServerStates`"""
        self.skips = 0
        """So many publications pass before it is tried again."""
        self.is_returning = False
        self._out = asyncio.Event()

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def is_routable(self) -> bool:
        return self.error is None and self.version is not None

    @property
    def label(self) -> str:
        """Of the version that it was confirmed to hold"""
        return version_label(self.version if self.version is not None else "none", self._run)

    async def unless_quarantined[T](self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises Quarantined, and cancels it, when this server goes into quarantine before."""
        out = self._out
        task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(out.wait())
        try:
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if out.is_set():
                raise Quarantined(f"{self.url} was put into quarantine")
            return task.result()
        finally:
            task.cancel()
            leaving.cancel()

    def leave(self, error: RolloutError) -> None:
        self.error, self.version, self.is_whole, self.is_suspect = error, None, False, False
        self.is_returning = self.has_answered = False
        self.skips = min(2**self.failures - 1, _MAX_SKIPPED)
        self.failures += 1
        self._out.set()

    def come_back(self, info: ServerInfo) -> None:
        """Answers again, with weights that nobody knows."""
        self.error, self.info, self.is_returning = None, info, True
        self._out = asyncio.Event()

    def label_problem(self, responses: Sequence[GenerateResponse], confirmed: int) -> RolloutError | None:
        """What is wrong with the version labels of responses to a request that was sent when `confirmed` was; the
        newest that may have sampled them is the one that is confirmed now."""
        versions = range(confirmed, self.version + 1) if self.version is not None else range(0)
        known = {version_label(version, self._run) for version in versions}
        for response in responses:
            for span in response.meta_info.weight_versions:
                if span.version not in known:
                    return RolloutError(
                        f"{self.url} sampled tokens with weight version {span.version}, but {confirmed} to "
                        f"{self.label} were confirmed there; was it restarted, or does another client publish to it?"
                    )
        return None


class ServerStates:
    """Decides which servers take part, which may be asked for responses, and when they are too few."""

    def __init__(self, servers: Sequence[Server], min_servers: int | None = None) -> None:
        """min_servers: None: all of them."""
        self.servers = tuple(servers)
        self.min_servers = len(servers) if min_servers is None else min_servers
        self.membership = 0
        """Another number whenever others take part in publications than before"""
        self.num_resyncs = 0
        self._quarantined: list[Server] = []
        self._publishing_since: float | None = None
        self._publishing_seconds = 0.0
        """Of all publications that have ended"""
        self._failure: RolloutError | None = None
        self._changed = asyncio.Event()

    @property
    def members(self) -> list[Server]:
        """Those that are not in quarantine"""
        return [server for server in self.servers if server.error is None]

    @property
    def quarantined(self) -> list[Server]:
        """In the order in which they were put there"""
        return list(self._quarantined)

    @property
    def enough(self) -> bool:
        return len(self.members) >= self.min_servers

    def quarantine(self, server: Server, error: RolloutError) -> None:
        """Nothing is sampled there any more, until a publication has succeeded there."""
        if server.error is not None:
            return
        server.leave(error)
        self._quarantined.append(server)
        self.membership += 1
        logger.warning(
            "%s; %s is in quarantine, %d of %d rollout servers are left",
            error,
            server.url,
            len(self.members),
            len(self.servers),
        )
        if self._publishing_since is None:
            self.fail_if_too_few()
        self._tell()

    def welcome(self, server: Server) -> None:
        """One more: out until a publication takes it in, as after a quarantine."""
        server.leave(RolloutError(f"{server.url} has not taken part in a publication yet"))
        server.failures = 0
        self.servers = (*self.servers, server)
        self._quarantined.append(server)
        logger.info("%s is new; it takes part in the next publication", server.url)

    def take_back(self, server: Server, info: ServerInfo) -> None:
        server.come_back(info)
        self._quarantined.remove(server)
        self.membership += 1

    def keep_out(self, server: Server, error: RolloutError) -> None:
        """It answered, and still cannot take part; without an answer, asking costs nothing."""
        if isinstance(error, RolloutServerDied):
            logger.debug("%s stays in quarantine: %s", server.url, error)
            return
        if str(error) != str(server.error):
            logger.warning("%s; %s stays in quarantine", error, server.url)
        server.error = error
        server.skips = min(2**server.failures - 1, _MAX_SKIPPED)
        server.failures += 1

    def begin_publication(self) -> None:
        """Until its end, the publisher decides whether the servers are too few: another way to them may be left."""
        if self._publishing_since is None:
            self._publishing_since = time.monotonic()

    def end_publication(self) -> None:
        if self._publishing_since is not None:
            self._publishing_seconds += time.monotonic() - self._publishing_since
            self._publishing_since = None
        for server in self.members:
            server.heard = self.clock()
        self.fail_if_too_few()

    def begin_update(self) -> None:
        """From now on, no member is known to hold a version as a whole."""
        for server in self.members:
            server.is_whole = False

    def confirm(self, version: int) -> None:
        """All members hold all of `version`, and nothing else."""
        for server in self.members:
            server.version, server.is_whole = version, True
            if server.has_answered:
                server.failures = 0
            if server.is_returning:
                server.is_returning = False
                self.num_resyncs += 1
                logger.info("%s is back, with version %d", server.url, version)
        self._tell()

    def accept(self, server: Server) -> None:
        """A response of it is used."""
        server.heard, server.has_answered = self.clock(), True

    def clock(self) -> float:
        """Seconds, as `time.monotonic` counts them outside publications: in one, servers are paused, or load."""
        now = self._publishing_since if self._publishing_since is not None else time.monotonic()
        return now - self._publishing_seconds

    def silence(self, server: Server) -> float:
        """Seconds since the last sign of life of a server that is asked for responses, or since the last publication.
        Its scheduler, which samples them, also answers for the lease, between two batches."""
        if self._publishing_since is not None:
            return 0.0
        return min(self.clock() - server.heard, time.monotonic() - server.lease.last_answer)

    def fail_if_too_few(self) -> None:
        if not self.enough and self._failure is None:
            *others, last = [server.error for server in self._quarantined if server.error is not None]
            text = str(last)
            if len(self.servers) > 1:
                text += (
                    f"; {len(self.members)} of {len(self.servers)} rollout servers are left, fewer than "
                    f"publish.min_servers = {self.min_servers}"
                )
            text += "".join(f"; before: {error}" for error in others)
            self._failure = type(last)(text)
            self._tell()

    def raise_if_too_few(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def wait_until_too_few(self) -> None:
        """Raises RolloutError then."""
        while True:
            self.raise_if_too_few()
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def counts(self) -> dict[str, float]:
        return {
            "servers_healthy": float(sum(server.is_routable for server in self.servers)),
            "servers_quarantined": float(len(self.quarantined)),
            "server_resyncs": float(self.num_resyncs),
        }

    def _tell(self) -> None:
        self._changed.set()

"""Which rollout servers take part: the state of each server, and whether enough of them are left.

Everything here lives in the pool's event loop.
"""

import asyncio
import enum
import math
from collections.abc import Awaitable, Callable, Sequence

from megatron_a3po.errors import RolloutError, RolloutServerDied
from megatron_a3po.fleet.client import SGLangClient
from megatron_a3po.fleet.lease import Lease
from megatron_a3po.fleet.protocol import GenerateResponse, ServerInfo, version_label
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.waiting import REAL

_MAX_SKIPPED = 31


class ServerState(enum.Enum):
    """What the run knows of a server's weights, and so what the server may be asked for."""

    CONNECTED = "connected"
    """It takes part in publications; no version is confirmed there yet."""
    SERVING = "serving"
    """It holds all of its confirmed version and nothing else; it is sampled from."""
    UPDATING = "updating"
    """Parts of another version may have been sent to it; responses by its confirmed version are still accepted."""
    RETURNING = "returning"
    """It answers again after a quarantine and takes part in the next publication; its weights are unknown."""
    QUARANTINED = "quarantined"
    """It gets no requests and no updates."""


class Event(enum.Enum):
    """What can happen to a server."""

    UPDATE_BEGUN = "an update has begun"
    CONFIRMED = "a version is confirmed"
    ANSWERED = "a response is used"
    FAILED = "it has failed"
    STILL_OUT = "it cannot return yet"
    RETURNED = "it answers again"


_S, _E = ServerState, Event
TRANSITIONS: dict[tuple[ServerState, Event], ServerState] = {
    (_S.CONNECTED, _E.UPDATE_BEGUN): _S.CONNECTED,
    (_S.CONNECTED, _E.CONFIRMED): _S.SERVING,
    (_S.CONNECTED, _E.FAILED): _S.QUARANTINED,
    (_S.SERVING, _E.UPDATE_BEGUN): _S.UPDATING,
    (_S.SERVING, _E.CONFIRMED): _S.SERVING,
    (_S.SERVING, _E.ANSWERED): _S.SERVING,
    (_S.SERVING, _E.FAILED): _S.QUARANTINED,
    (_S.UPDATING, _E.UPDATE_BEGUN): _S.UPDATING,
    (_S.UPDATING, _E.CONFIRMED): _S.SERVING,
    (_S.UPDATING, _E.ANSWERED): _S.UPDATING,
    (_S.UPDATING, _E.FAILED): _S.QUARANTINED,
    (_S.RETURNING, _E.UPDATE_BEGUN): _S.RETURNING,
    (_S.RETURNING, _E.CONFIRMED): _S.SERVING,
    (_S.RETURNING, _E.FAILED): _S.QUARANTINED,
    (_S.QUARANTINED, _E.STILL_OUT): _S.QUARANTINED,
    (_S.QUARANTINED, _E.RETURNED): _S.RETURNING,
}
"""An event without a row here is an error of the program."""


class Quarantined(RolloutError):
    """The server went into quarantine before it answered."""


class Server:
    """One rollout server: its client, its lease and its state.

    `state` and all that depends on it change only in the methods of the events.
    """

    def __init__(self, client: SGLangClient, lease: Lease, run: str | None = None) -> None:
        """run: who publishes, in the labels of the weights."""
        self.client = client
        self.lease = lease
        self.control = ControlCalls()
        self._run = run
        self.info: ServerInfo | None = None
        """How the server described itself when the run met it last"""
        self.is_suspect = False
        """A connection was lost: another process may answer at this address now."""
        self.last_heard = -math.inf
        """When it last gave a response or was first asked for one, by `Membership.clock`"""
        self._state = ServerState.CONNECTED
        self._version: int | None = None
        self._error: RolloutError | None = None
        self._num_failures = 0
        self._has_answered = False
        self._num_skips = 0
        self._out = asyncio.Event()

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def state(self) -> ServerState:
        return self._state

    @property
    def version(self) -> int | None:
        """The version that it was last confirmed to hold as a whole; None: none since the run met it."""
        return self._version

    @property
    def error(self) -> RolloutError | None:
        """Why it is in quarantine; None while it is not."""
        return self._error

    @property
    def is_member(self) -> bool:
        """It takes part in publications."""
        return self._state is not ServerState.QUARANTINED

    @property
    def is_routable(self) -> bool:
        """It may be asked for responses."""
        return self._state in (ServerState.SERVING, ServerState.UPDATING)

    @property
    def is_whole(self) -> bool:
        """All that it holds is its confirmed version."""
        return self._state is ServerState.SERVING

    @property
    def label(self) -> str:
        """The label of its confirmed version."""
        return version_label(self._version if self._version is not None else "none", self._run)

    def begin_update(self) -> None:
        """From now on, parts of another version may be sent to it."""
        self._move(Event.UPDATE_BEGUN)

    def confirm(self, version: int) -> bool:
        """It holds all of `version`. Return whether it is back from a quarantine with it."""
        was_returning = self._state is ServerState.RETURNING
        self._move(Event.CONFIRMED)
        self._version = version
        if self._has_answered:
            self._num_failures = 0
        return was_returning

    def accept(self, now: float) -> None:
        """A response of it is used."""
        self._move(Event.ANSWERED)
        self.last_heard, self._has_answered = now, True

    def fail(self, error: RolloutError) -> None:
        """It goes into quarantine. A server that fails again and again is asked ever more rarely to return."""
        self._move(Event.FAILED)
        self._error, self._version = error, None
        self.is_suspect = self._has_answered = False
        self._count_failure()
        self._out.set()

    def stay_out(self, error: RolloutError) -> None:
        """It answered in quarantine and still cannot take part."""
        self._move(Event.STILL_OUT)
        self._error = error
        self._count_failure()

    def come_back(self, info: ServerInfo) -> None:
        """It answers again, with weights that nobody knows."""
        self._move(Event.RETURNED)
        self._error, self.info = None, info
        self._out = asyncio.Event()

    def join_late(self) -> None:
        """A server that joins a run under way is out until a publication takes it in. It has not failed yet."""
        self.fail(RolloutError(f"{self.url} has not taken part in a publication yet"))
        self._num_failures = 0

    def may_return(self) -> bool:
        """Return whether its turn to be asked has come; each turn that it misses counts."""
        if self._num_skips > 0:
            self._num_skips -= 1
            return False
        return True

    async def unless_quarantined[T](self, work: Awaitable[T]) -> T:
        """Return the result of `work`. Raises Quarantined, and cancels `work`, when this server fails before."""
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

    def label_problem(self, responses: Sequence[GenerateResponse], confirmed: int) -> RolloutError | None:
        """Return what is wrong with the labels of responses to a request that was sent when `confirmed` was confirmed.

        The newest version that may have sampled them is the one that is confirmed now.
        """
        versions = range(confirmed, self._version + 1) if self._version is not None else range(0)
        known = {version_label(version, self._run) for version in versions}
        for response in responses:
            for span in response.meta_info.weight_versions:
                if span.version not in known:
                    return RolloutError(
                        f"{self.url} sampled tokens with weight version {span.version}, but {confirmed} to "
                        f"{self.label} were confirmed there; was it restarted, or does another client publish to it?"
                    )
        return None

    def _move(self, event: Event) -> None:
        try:
            self._state = TRANSITIONS[self._state, event]
        except KeyError:
            raise ValueError(f"{self.url}: {event.value}, in the state {self._state.value}") from None

    def _count_failure(self) -> None:
        self._num_skips = min(2**self._num_failures - 1, _MAX_SKIPPED)
        self._num_failures += 1


class ControlCalls:
    """The control calls to one server, one after the other: a call that undoes another must not overtake it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.current: asyncio.Task[object] | None = None
        self.groups: list[str] = []
        """Names of the update groups that the server was asked to join and has not confirmed to have left"""


class Membership:
    """Decides which servers take part, which may be asked for responses, and when they are too few."""

    def __init__(
        self, servers: Sequence[Server], min_servers: int | None = None, now: Callable[[], float] = REAL.now
    ) -> None:
        """min_servers: None stands for all of them. now: a clock in seconds."""
        self.servers = tuple(servers)
        self.min_servers = len(servers) if min_servers is None else min_servers
        self.revision = 0
        """Changes whenever other servers take part than before"""
        self.num_resyncs = 0
        self._now = now
        self._quarantined: list[Server] = []
        self._publishing_since: float | None = None
        self._publishing_seconds = 0.0
        """Of all publications that have ended"""
        self._failure: RolloutError | None = None
        self._changed = asyncio.Event()

    @property
    def members(self) -> list[Server]:
        """The servers that are not in quarantine."""
        return [server for server in self.servers if server.is_member]

    @property
    def quarantined(self) -> list[Server]:
        """The servers in quarantine, in the order in which they went there."""
        return list(self._quarantined)

    @property
    def enough(self) -> bool:
        return len(self.members) >= self.min_servers

    def quarantine(self, server: Server, error: RolloutError) -> None:
        """Take the server out until a publication has succeeded there; the first reason stays."""
        if not server.is_member:
            return
        server.fail(error)
        self._quarantined.append(server)
        self.revision += 1
        left = f"{len(self.members)} of {len(self.servers)} rollout servers are left"
        logger.warning("%s; %s is in quarantine, %s", error, server.url, left)
        if self._publishing_since is None:
            self.fail_if_too_few()
        self._tell()

    def welcome(self, server: Server) -> None:
        """Add a server that has come since. It takes part from the next publication on."""
        server.join_late()
        self.servers = (*self.servers, server)
        self._quarantined.append(server)
        logger.info("%s is new; it takes part in the next publication", server.url)

    def take_back(self, server: Server, info: ServerInfo) -> None:
        """Let a server in quarantine take part in the next publication."""
        server.come_back(info)
        self._quarantined.remove(server)
        self.revision += 1

    def keep_out(self, server: Server, error: RolloutError) -> None:
        """Keep a server in quarantine. Asking one that does not answer at all costs nothing, and is not counted."""
        if isinstance(error, RolloutServerDied):
            logger.debug("%s stays in quarantine: %s", server.url, error)
            return
        if str(error) != str(server.error):
            logger.warning("%s; %s stays in quarantine", error, server.url)
        server.stay_out(error)

    def begin_publication(self) -> None:
        """Until `end_publication`, too few servers are no error: the publisher may still use its fallback transport."""
        if self._publishing_since is None:
            self._publishing_since = self._now()

    def end_publication(self) -> None:
        """From now on, too few servers are an error wherever it shows."""
        if self._publishing_since is not None:
            self._publishing_seconds += self._now() - self._publishing_since
            self._publishing_since = None
        for server in self.members:
            server.last_heard = self.clock()
        self.fail_if_too_few()

    def begin_update(self) -> None:
        """From now on, no member is known to hold a version as a whole."""
        for server in self.members:
            server.begin_update()

    def confirm(self, version: int) -> None:
        """All members hold all of `version`, and nothing else."""
        for server in self.members:
            if server.confirm(version):
                self.num_resyncs += 1
                logger.info("%s is back, with version %d", server.url, version)
        self._tell()

    def accept(self, server: Server) -> None:
        """A response of this server is used."""
        server.accept(self.clock())

    def clock(self) -> float:
        """Return the seconds outside publications: during a publication, servers are paused or load weights."""
        now = self._publishing_since if self._publishing_since is not None else self._now()
        return now - self._publishing_seconds

    def silence(self, server: Server) -> float:
        """Return the seconds since the last sign of life of a server that is asked for responses.

        Publications do not count. The scheduler, which samples the responses, also answers for the lease, between two
        batches.
        """
        if self._publishing_since is not None:
            return 0.0
        return min(self.clock() - server.last_heard, self._now() - server.lease.last_answer)

    def fail_if_too_few(self) -> None:
        """If too few servers are left, `raise_if_too_few` raises from now on."""
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
        """Raise the RolloutError that names all servers that failed, if too few are left."""
        if self._failure is not None:
            raise self._failure

    async def wait_until_too_few(self) -> None:
        """Wait until too few servers are left; then raise RolloutError."""
        while True:
            self.raise_if_too_few()
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait until a server changes its state in a way that others wait for."""
        self._changed.clear()
        await self._changed.wait()

    def counts(self) -> dict[str, float]:
        """Return the metrics of the servers."""
        return {
            "servers_healthy": float(sum(server.is_routable for server in self.servers)),
            "servers_quarantined": float(len(self.quarantined)),
            "server_resyncs": float(self.num_resyncs),
        }

    def _tell(self) -> None:
        self._changed.set()

"""The rollout servers as the weight publisher uses them, from the trainer's thread."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet import recovery
from megatron_a3po.fleet.client import RequestRefused
from megatron_a3po.fleet.event_loop import EventLoopThread
from megatron_a3po.fleet.membership import Server
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import WeightChecksums, label_request, parse_answer, unfinished_label, version_label
from megatron_a3po.fleet.server_quantization import UNQUANTISED, is_unquantised
from megatron_a3po.runtime.background import in_background
from megatron_a3po.runtime.logging import logger

_NOT_FLUSHED = "Weights were updated, but the cache was not flushed"
"""What SGLang answers, with status 400, to an update that succeeded while requests ran"""


type CallBack = Literal["none", "due", "all"]
"""Which servers in quarantine shall take part again if they answer: none, those whose turn has come, or all"""
type Recovery = Literal["done", "again", "failed"]
"""After a failed attempt: the servers that are left hold the version, another attempt makes sense, or none does"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """The servers that take part in a publication."""

    urls: list[str]
    world_size: int
    """Of an update group: the sender and every rank of every server"""
    number: int
    """A revision: it changes when other servers take part, or when a server has left its groups meanwhile."""


@dataclass(slots=True)
class Fleet:
    """Control calls to all servers that take part in a publication, at the same time.

    Each raises RolloutError when a server fails, which then is in quarantine. The order of one publication, observed
    on SGLang 0.5.23: pause, begin, update for every bucket, end, resume. Before the first bucket, the server's label
    says that a version is unfinished; the last bucket brings the version, and has the server forget what it has cached
    with the old weights.
    """

    pool: ServerPool
    loop: EventLoopThread
    timeout_seconds: float
    """For one control call"""
    find_urls: Callable[[], list[str]] = list
    """Returns the addresses of all servers, of which some may be new."""
    _participants: list[Server] = field(default_factory=list)
    _unflushed: dict[Server, str] = field(default_factory=dict)
    """Servers that hold new weights, with their label, and still keys and values of the old ones"""
    _has_no_news: bool = False

    @property
    def urls(self) -> list[str]:
        """The addresses of the servers that take part."""
        return [server.url for server in self.pool.membership.members]

    @property
    def served_models(self) -> list[tuple[str, str, str | None]]:
        """URL, model folder and quantisation of every server, as the server says itself.

        Where the folder is not seen here, the server's tensors tell whether it is UNQUANTISED.
        """
        return self.loop.run(self._served_models())

    @property
    def revision(self) -> int:
        """A revision: it changes when other servers take part, or when a server has left its groups meanwhile."""
        return self.pool.membership.revision

    @property
    def group_world_size(self) -> int:
        """The trainer's sender and every rank of every server."""
        return 1 + sum(self._tp_sizes())

    def settle_members(self, *, call_back: CallBack) -> None:
        """Decide which servers take part in the next attempt to publish. Raises RolloutError when they are too few."""
        self.loop.run(self._settle_members(call_back))

    def mark_failed(self) -> None:
        """Say that an attempt has failed: what fails from now on is its consequence."""
        self.pool.publication_has_failed = True

    def recover(self, version: int) -> Recovery:
        """Clean up after a failed attempt, and return what to do next.

        Servers that do not answer go into quarantine; those that hold a whole version go on. Returns "done" when all
        servers that are left hold `version`, "again" when a server was to blame and enough are left, else "failed".
        """
        return self.loop.run(self._recover(version))

    def end_publication(self) -> None:
        """From now on, too few servers are an error wherever it shows."""
        self._change(self.pool.membership.end_publication)

    def create_group(self, name: str, address: str, port: int, backend: str, timeout_seconds: float) -> Future[Any]:
        """Have all servers join an update group. Returns at once; the servers answer when all ranks have joined."""

        async def create() -> None:
            offset, bodies, world_size = 1, {}, self.group_world_size
            for server, tp_size in zip(self.pool.membership.members, self._tp_sizes(), strict=True):
                bodies[server] = {
                    "master_address": address,
                    "master_port": port,
                    "rank_offset": offset,
                    "world_size": world_size,
                    "group_name": name,
                    "backend": backend,
                }
                offset += tp_size
            patience = self._patience(timeout_seconds)

            async def join(server: Server) -> None:
                server.control.groups.append(name)
                await self.pool.post(server, "/init_weights_update_group", bodies[server], patience)

            await self.pool.for_each(join, together=True)

        return self.loop.submit(create())

    def destroy_group(self, name: str) -> Future[Any]:
        """Have all servers leave an update group. Returns at once: the trainer's ranks should leave with them."""
        return self.loop.submit(self.pool.for_each(partial(recovery.leave_group, self.pool, name=name)))

    def leave_stale_group(self, name: str) -> None:
        """Have all servers leave a group that a dead run or a failed publication may have left there."""
        leave = partial(recovery.leave_group, self.pool, name=name, timeout_seconds=self.pool.timings.grace_seconds)
        self.loop.run(self.pool.for_each(leave))

    def pause(self) -> None:
        """Pause generation, as `publish.pause_mode` says.

        retract: running requests go back to the queue, keep their tokens, and go on with the new weights after
        `resume`. in_place: they stay where they are. abort: they end, and the sampler has them continued.
        """
        self.pool.num_pauses += 1
        self._post("/pause_generation", {"mode": self.pool.pause_mode})

    def begin(self, version: int) -> None:
        """Open an update session and mark `version` as unfinished, before its first bucket."""
        self._post("/begin_weight_update", {})
        self._mark_unfinished(version)

    def update(self, body: dict[str, Any], timeout_seconds: float) -> Future[Any]:
        """Announce one bucket; the result comes when every server has received and loaded it.

        body: the last bucket has a `weight_version`.
        """
        path, patience = "/update_weights_from_distributed", self._patience(timeout_seconds)
        return self.loop.submit(self._update(path, body, patience, together=True))

    def update_from_disk(self, folder: str, version: str, timeout_seconds: float) -> None:
        """Have every server read the weights in `folder` and take on their version."""
        self._mark_unfinished(version)
        # The format is named, since a server may have been started without weights.
        body = {"model_path": folder, "weight_version": version, "load_format": "auto"}
        self.loop.run(self._update("/update_weights_from_disk", body, timeout_seconds, together=False))

    def end(self) -> None:
        """Close the update session."""
        self._post("/end_weight_update", {})

    def flush(self) -> None:
        """Flush the caches again where requests that still ran kept a server from doing so with the update.

        On a CPU each attempt takes SGLang half a second of garbage collection, which the update spares.
        """
        if self._unflushed:
            self.loop.run(self.pool.for_each(self._flush))

    def versions(self) -> dict[str, str]:
        """Return the label of each server's weights by URL, as the server says itself."""
        return self.loop.run(self._versions())

    def checksums(self) -> dict[str, list[dict[str, str]]]:
        """Return the checksums of the weights by URL, for every rank of the server by the server's tensor names."""
        return self.loop.run(self._checksums())

    def reject(self, problems: Mapping[str, str]) -> None:
        """Put servers into quarantine, each with its reason by its URL."""

        def reject() -> None:
            for server in self.pool.membership.members:
                if server.url in problems:
                    self.pool.membership.quarantine(server, RolloutError(problems[server.url]))

        self._change(reject)

    def confirm(self, version: int) -> None:
        """From now on accept tokens of `version`, which all members are known to hold as a whole."""
        self._change(partial(self.pool.membership.confirm, version))

    def resume(self) -> None:
        """Have all servers go on generating."""
        self._post("/continue_generation", {})

    def counts(self) -> dict[str, float]:
        """Return the metrics of the servers."""
        return self.pool.membership.counts()

    def _patience(self, timeout_seconds: float) -> float:
        """Return how long to wait for a server that may itself wait `timeout_seconds` for another one that is gone."""
        return timeout_seconds + 2 * self.pool.timings.grace_seconds

    def _tp_sizes(self) -> list[int]:
        return [server.info.tp_size if server.info is not None else 1 for server in self.pool.membership.members]

    def _change(self, change: Callable[[], None]) -> None:
        async def run() -> None:
            change()

        self.loop.run(run())

    def _post(self, path: str, body: dict[str, Any]) -> None:
        self.loop.run(self.pool.post_to_all(path, body, self.timeout_seconds))

    def _mark_unfinished(self, version: int | str) -> None:
        """Label the weights, so that the servers themselves say it if this run is killed before the update ends."""
        self._change(self.pool.membership.begin_update)
        self._post("/update_weight_version", label_request(unfinished_label(version, self.pool.run)))

    async def _settle_members(self, call_back: CallBack) -> None:
        membership = self.pool.membership
        membership.begin_publication()
        self.pool.publication_has_failed = False
        self._unflushed.clear()
        if call_back != "none":
            for url in await self._find_urls():
                self.pool.add(url)
            await recovery.call_back(self.pool, at_once=call_back == "all")
        await recovery.take_back_leases(self.pool, self.timeout_seconds)
        if not membership.enough:
            membership.fail_if_too_few()
        membership.raise_if_too_few()
        self._participants = membership.members

    async def _find_urls(self) -> list[str]:
        """Return no URLs where they cannot be read now: no server that takes part depends on it."""
        try:
            urls = await asyncio.wrap_future(in_background(self.find_urls, "registrations"))
        except OSError as error:
            if not self._has_no_news:
                logger.warning("new rollout servers cannot be looked up (%s); trying again later", error)
            self._has_no_news = True
            return []
        self._has_no_news = False
        return urls

    async def _served_models(self) -> list[tuple[str, str, str | None]]:
        found = []
        for server in self.pool.membership.members:
            if (info := server.info) is None:
                continue
            is_seen = Path(info.model_path, "config.json").is_file()
            asks = info.quantization is None and not is_seen
            quantization = UNQUANTISED if asks and await is_unquantised(self.pool, server) else info.quantization
            found.append((server.url, info.model_path, quantization))
        return found

    async def _recover(self, version: int) -> Recovery:
        membership = self.pool.membership
        await recovery.undo_publication(self.pool, self._participants)
        if membership.enough and all(server.is_whole and server.version == version for server in membership.members):
            return "done"
        return "again" if membership.enough and len(membership.members) < len(self._participants) else "failed"

    async def _update(self, path: str, body: dict[str, Any], timeout_seconds: float, *, together: bool) -> None:
        # In place, what was cached with the old weights is in use, and stays.
        flushes = "weight_version" in body and self.pool.pause_mode != "in_place"
        if "weight_version" in body:
            body = body | {"weight_version": version_label(body["weight_version"], self.pool.run)}

        async def update(server: Server) -> None:
            try:
                await self.pool.post(server, path, body | {"flush_cache": flushes}, timeout_seconds)
            except RequestRefused as error:
                if not flushes or _NOT_FLUSHED not in str(error):
                    raise
                logger.debug("%s", error)
                self._unflushed[server] = body["weight_version"]

        await self.pool.for_each(update, together=together)

    async def _flush(self, server: Server) -> None:
        timings = self.pool.timings
        for attempt in range(1, timings.flush_attempts + 1) if server in self._unflushed else ():
            try:
                await self.pool.post(server, "/flush_cache", {}, self.timeout_seconds)
                break
            except RequestRefused as error:
                if attempt == timings.flush_attempts:
                    raise RequestRefused(f"{error}, {attempt} times in a row") from None
                await asyncio.sleep(timings.flush_seconds * 2 ** (attempt - 1))
        if (version := self._unflushed.pop(server, None)) is not None:
            # The server's front end does not take on the version of a call that was refused in part.
            await self.pool.post(server, "/update_weight_version", label_request(version), self.timeout_seconds)

    async def _versions(self) -> dict[str, str]:
        async def version(server: Server) -> tuple[str, str]:
            label = await server.client.weight_version()
            if label is None:
                raise RolloutError(f"{server.url} does not say which weight version it holds")
            return server.url, label.removesuffix(version_label("", self.pool.run))

        return dict(await self.pool.for_each(version))

    async def _checksums(self) -> dict[str, list[dict[str, str]]]:
        async def checksums(server: Server) -> tuple[str, list[dict[str, str]]]:
            answer = await self.pool.post(server, "/weights_checker", {"action": "checksum"})
            parsed = parse_answer(WeightChecksums, answer, f"{server.url}/weights_checker")
            return server.url, [rank.checksums for rank in parsed.ranks]

        return dict(await self.pool.for_each(checksums))

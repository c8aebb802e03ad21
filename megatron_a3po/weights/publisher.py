"""A new weight version for every rollout server, or an error: never a half-updated model that goes on."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from megatron_a3po.errors import A3poError, PublishError
from megatron_a3po.fleet.publication import CallBack, Fleet, Members
from megatron_a3po.parallel.agreement import EXPECTED, describe, problem_of
from megatron_a3po.parallel.messages import broadcast_json, gather_json
from megatron_a3po.runtime.background import in_background
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.double_buffer import DoubleBuffer
from megatron_a3po.weights.plan import Bucket, Plan
from megatron_a3po.weights.store_messages import Stopped, StoreMessages
from megatron_a3po.weights.verify_servers import check_servers

_publications = itertools.count()


class WeightSource(Protocol):
    """Where the tensors come from; `gather.WeightCollector` is the real one."""

    @property
    def plan(self) -> Plan: ...
    @property
    def device(self) -> torch.device: ...
    def fill(self, bucket: Bucket, buffer: Tensor | None) -> None: ...
    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...


class Transport(Protocol):
    """A way to the servers: `transport.GroupTransport`, `disk.DiskTransport` or `delta_transport.DeltaTransport`."""

    why_not: str
    """What to tell the user when this one has to take over"""

    def prepare(self, members: Members) -> None:
        """On every rank, before each attempt. Raises PublishError on all of them."""

    def send(self, bucket: Bucket, buffer: Tensor, messages: StoreMessages) -> None:
        """On the owner, for its buckets in order. `buffer` [bucket.nbytes] uint8 is free again afterwards."""

    def deliver(self, version: int, messages: StoreMessages, timer: PhaseTimer) -> None:
        """On rank 0, meanwhile: pause the servers, and have them take all buckets and the version."""

    def metrics(self) -> dict[str, float]:
        """On rank 0, of the last publication."""

    def close(self) -> None: ...

    def abandon(self) -> None:
        """After a failed attempt, on every rank: go on without what it has left. Raises nothing, waits for nothing."""


class WeightPublisher:
    """On every rank; rank 0, which has the `fleet`, talks to the servers. A context manager."""

    def __init__(
        self,
        source: WeightSource,
        transport: Transport,
        fleet: Fleet | None,
        gloo_group: dist.ProcessGroup,
        *,
        timer: PhaseTimer,
        fallback: Transport | None = None,
        num_buffers: int = 2,
    ) -> None:
        """gloo_group: all ranks, which may wait in it for long. fallback: takes over when `transport` has failed.
        num_buffers: with 1, a bucket is filled when the one before is sent."""
        self._source = source
        self._transport = transport
        self._fallback = fallback
        self._fleet = fleet
        self._gloo_group = gloo_group
        self._timer = timer
        self._rank = dist.get_rank()
        self._owned = [bucket for bucket in source.plan.buckets if bucket.owner == self._rank]
        self._num_buffers = min(num_buffers, len(self._owned))
        # For this thread, the one that sends and the one that announces: a client of a store serves one at a time.
        self._stores = [c10d._get_default_store().clone() for _ in range(3)]

    @property
    def plan(self) -> Plan:
        return self._source.plan

    @property
    def staging_bytes(self) -> int:
        """Of this rank's buffers while it publishes."""
        return self._num_buffers * max((bucket.nbytes for bucket in self._owned), default=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error the servers' state is unknown: the next run's reset, or the server's end, clears it.
        if error is None:
            self._transport.close()

    def publish(self, version: int) -> dict[str, float]:
        """Give every server the present weights as `version`; returns metrics. Collective. Raises PublishError.

        A server that fails is put into quarantine, and the others are published to again; one that was in quarantine
        and answers again takes part. An error, when they are too few, is raised on all ranks. Then a server that holds
        parts of a version stays paused, and one that holds a whole one goes on.
        """
        with self._timer.phase("publish"):
            reason = self._publish(version, call_back="due")
            if reason is not None and self._fallback is not None and self._are_enough():
                logger.error("version %d was not published: %s\n%s", version, reason, self._fallback.why_not)
                self._transport, self._fallback = self._fallback, None
                second = self._publish(version, call_back="none")
                reason = f"{reason}; then: {second}" if second is not None else None
        if self._fleet is not None:
            self._fleet.end_publication()
        if reason is not None:
            raise PublishError(f"version {version} was not published: {reason}")
        counts = self._fleet.counts() if self._fleet is not None else {}
        return {
            "published_bytes": float(self.plan.nbytes),
            "publish_buckets": float(len(self.plan.buckets)),
            **self._transport.metrics(),
            **counts,
        }

    def _publish(self, version: int, *, call_back: CallBack) -> str | None:
        """In as many attempts as servers that fail make necessary. Why it failed, the same on every rank."""
        reason = self._attempt(version, call_back)
        while reason is not None:
            self._transport.abandon()
            recovery = broadcast_json(self._recover(version), self._gloo_group)
            if recovery == "done":
                return None
            if recovery == "failed":
                return reason
            again = self._attempt(version, "none")
            reason = f"{reason}; then: {again}" if again is not None else None
        return None

    def _recover(self, version: int) -> str:
        """On rank 0."""
        if self._fleet is None:
            return ""
        try:
            return self._fleet.recover(version)
        except EXPECTED:
            logger.exception("the servers could not be freed of version %d", version)
            return "failed"

    def _attempt(self, version: int, call_back: CallBack) -> str | None:
        """Why it failed, the same on every rank; None if it did not."""
        members, reason = broadcast_json(self._muster(call_back), self._gloo_group)
        if reason is None:
            # Its errors are the same on all ranks.
            reason = problem_of(lambda: self._transport.prepare(Members(**members)))
        if reason is not None:
            return str(reason)
        name = f"publication {next(_publications)}"
        messages, sending, announcing = (StoreMessages(store, name) for store in self._stores)
        announcer = None
        if self._fleet is not None:
            announcer = in_background(partial(self._announce, version, announcing), "publication")
        self._send_own(messages, sending)
        if announcer is not None:
            announcer.result()
        reason = messages.stop_reason()
        if reason is not None and self._fleet is not None:
            # Before any rank leaves its group, which the servers will feel.
            self._fleet.mark_failed()
        reasons = gather_json(reason, self._gloo_group)
        for told in (messages, sending, announcing):
            told.forget()
        return next((text for text in reasons if text is not None), None)

    def _are_enough(self) -> bool:
        """Whether another way to the servers may help: those that have failed answer."""
        _, reason = broadcast_json(self._muster("all"), self._gloo_group)
        return reason is None

    def _muster(self, call_back: CallBack) -> tuple[dict[str, Any], str | None]:
        """On rank 0: who takes part, or why there are too few."""
        fleet = self._fleet
        if fleet is None:
            return {}, None
        if (reason := problem_of(lambda: fleet.settle_members(call_back=call_back))) is not None:
            return {}, reason
        return asdict(Members(urls=fleet.urls, world_size=fleet.group_world_size, number=fleet.membership)), None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the present weights as they are published, on rank 0. To be gone through by every rank."""
        return self._source.tensors()

    def _send_own(self, messages: StoreMessages, sending: StoreMessages) -> None:
        """Take part in collecting every bucket, and send those that are this rank's.

        Errors become a reason to stop. Only those of collectives are raised: the ranks are no longer together.
        """
        pipeline = None
        if self._owned:
            send = partial(self._transport.send, messages=sending)
            size = max(bucket.nbytes for bucket in self._owned)
            pipeline = DoubleBuffer(send, size, self._source.device, num_buffers=self._num_buffers)
        failed = False
        for bucket in self._source.plan.buckets:
            buffer = None
            if pipeline is not None and bucket.owner == self._rank and not failed:
                buffer = pipeline.take_buffer()
            try:
                self._source.fill(bucket, buffer[: bucket.nbytes] if buffer is not None else None)
            except A3poError as error:
                messages.stop(describe(error))
                # The others do not know yet, and go on collecting with this rank.
                failed, buffer = True, None
            except BaseException as error:
                messages.stop(f"rank {self._rank}: {describe(error)}")
                raise
            if pipeline is not None and buffer is not None:
                pipeline.put(bucket, buffer)
        try:
            if pipeline is not None:
                pipeline.finish()
        except Stopped:
            pass
        except EXPECTED as error:
            messages.stop(describe(error))

    def _announce(self, version: int, messages: StoreMessages) -> None:
        assert self._fleet is not None
        try:
            self._transport.deliver(version, messages, self._timer)
            with self._timer.phase("publish/flush"):
                self._fleet.flush()
            with self._timer.phase("publish/checksums"):
                check_servers(self._fleet, version)
            with self._timer.phase("publish/resume"):
                self._fleet.confirm(version)
                self._fleet.resume()
        except Stopped:
            pass
        except EXPECTED as error:
            messages.stop(describe(error))
        except BaseException as error:
            messages.stop(describe(error))
            raise

"""Publish a new weight version to every rollout server, or fail: no server samples from a half-updated model.

One publication: rank 0 settles which servers take part. The ranks collect the weights bucket by bucket; the owner of
each bucket sends it through a transport while the next one is filled. Meanwhile rank 0 has the servers pause and load
the buckets, checks that all hold the same new weights, and has them resume. When a server fails, it is put into
quarantine, the others are freed, and the publication is attempted again.
"""

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
from megatron_a3po.parallel.agreement import EXPECTED, describe, on_rank_zero, problem_of
from megatron_a3po.parallel.messages import broadcast_json, gather_json
from megatron_a3po.runtime.background import in_background
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.double_buffer import DoubleBuffer
from megatron_a3po.weights.plan import Bucket, Plan
from megatron_a3po.weights.store_messages import Stopped, StoreMessages
from megatron_a3po.weights.verify_servers import check_servers

_publication_numbers = itertools.count()


class WeightSource(Protocol):
    """Where the tensors come from; `gather.WeightCollector` is the real one."""

    @property
    def plan(self) -> Plan: ...
    @property
    def device(self) -> torch.device: ...
    def fill(self, bucket: Bucket, buffer: Tensor | None) -> None: ...
    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...


class Transport(Protocol):
    """A way to the servers: `GroupTransport`, `DiskTransport` or `DeltaTransport`. Every rank has one."""

    fallback_note: str
    """What to tell the user when this transport has to take over"""

    def prepare(self, members: Members) -> None:
        """Get ready for an attempt with these members, on every rank. Raises PublishError on all of them."""

    def send(self, bucket: Bucket, buffer: Tensor, messages: StoreMessages) -> None:
        """Send a bucket, on its owner, in the plan's order. `buffer` [bucket.nbytes] uint8 is free again afterwards."""

    def deliver(self, version: int, messages: StoreMessages, timer: PhaseTimer) -> None:
        """Pause the servers, and have them take all buckets and the version. On rank 0, while the owners send."""

    def metrics(self) -> dict[str, float]:
        """Return what is known of the last publication, on rank 0."""

    def close(self) -> None:
        """Part from the servers after the last publication, on every rank."""

    def abandon(self) -> None:
        """Give up what a failed attempt has left, on every rank. Raises nothing, and waits for no other rank."""


class WeightPublisher:
    """Publishes the policy's weights. Every rank has one; rank 0's has the `fleet`. A context manager."""

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
        """gloo_group: of all ranks, which may wait in it for long. fallback: takes over when `transport` has failed.
        num_buffers: with 1, a bucket is filled only after the one before has been sent."""
        self._source = source
        self._transport = transport
        self._fallback = fallback
        self._fleet = fleet
        self._gloo_group = gloo_group
        self._timer = timer
        self._rank = dist.get_rank()
        self._owned = [bucket for bucket in source.plan.buckets if bucket.owner == self._rank]
        self._num_buffers = min(num_buffers, len(self._owned))
        # A client of a store serves one thread at a time: one each for this thread, the sender and the announcer.
        self._stores = [c10d._get_default_store().clone() for _ in range(3)]

    @property
    def plan(self) -> Plan:
        return self._source.plan

    @property
    def staging_bytes(self) -> int:
        """Size of this rank's buffers while it publishes."""
        return self._num_buffers * self.plan.largest_bucket(self._rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error the servers' state is unknown: the next run's reset, or the server's end, clears it.
        if error is None:
            self._transport.close()

    def publish(self, version: int) -> dict[str, float]:
        """Give every server the present weights as `version`, and return metrics. Collective.

        A server that fails is put into quarantine, and the others are published to again. A server that was in
        quarantine and answers again takes part. Raises PublishError on all ranks when too few servers are left; then a
        server that holds parts of a version stays paused, and one that holds a whole version goes on.
        """
        with self._timer.phase("publish"):
            reason = self._publish_through(self._transport, version, call_back="due")
            if reason is not None and self._fallback is not None and self._enough_answer():
                logger.error("version %d was not published: %s\n%s", version, reason, self._fallback.fallback_note)
                self._transport, self._fallback = self._fallback, None
                second = self._publish_through(self._transport, version, call_back="none")
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

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all present weights for an export on rank 0, in the trainer's precision. Every rank must exhaust it."""
        return self._source.tensors()

    def _publish_through(self, transport: Transport, version: int, *, call_back: CallBack) -> str | None:
        """Attempt the publication, again whenever servers failed and enough are left.

        Returns why it failed, the same on every rank, or None.
        """
        reason = self._attempt(transport, version, call_back)
        while reason is not None:
            transport.abandon()
            recovery = broadcast_json(self._recover(version), self._gloo_group)
            if recovery == "done":
                return None
            if recovery == "failed":
                return reason
            again = self._attempt(transport, version, "none")
            reason = f"{reason}; then: {again}" if again is not None else None
        return None

    def _attempt(self, transport: Transport, version: int, call_back: CallBack) -> str | None:
        """Settle the members, collect and send all buckets, and have the servers take them.

        Returns why that failed, the same on every rank, or None.
        """
        # Both raise the same error on all ranks.
        reason = problem_of(lambda: transport.prepare(self._settle_members(call_back)))
        if reason is not None:
            return reason
        name = f"publication {next(_publication_numbers)}"
        messages, of_sender, of_announcer = (StoreMessages(store, name) for store in self._stores)
        announcer = None
        if self._fleet is not None:
            deliver = partial(self._deliver, self._fleet, transport, version, of_announcer)
            announcer = in_background(deliver, "publication")
        self._collect_and_send(transport, messages, of_sender)
        if announcer is not None:
            announcer.result()
        reason = messages.stop_reason()
        if reason is not None and self._fleet is not None:
            # The fleet is told before any rank leaves its group. Servers fail when one does, which is not their fault.
            self._fleet.mark_failed()
        reasons = gather_json(reason, self._gloo_group)
        for told in (messages, of_sender, of_announcer):
            told.forget()
        return next((text for text in reasons if text is not None), None)

    def _settle_members(self, call_back: CallBack) -> Members:
        """Return which servers take part. Collective. Raises PublishError on every rank when they are too few."""

        def settle() -> dict[str, Any]:
            fleet = self._fleet
            assert fleet is not None
            fleet.settle_members(call_back=call_back)
            return asdict(Members(urls=fleet.urls, world_size=fleet.group_world_size, number=fleet.revision))

        return Members(**on_rank_zero(settle, self._gloo_group, PublishError))

    def _collect_and_send(self, transport: Transport, messages: StoreMessages, of_sender: StoreMessages) -> None:
        """Take part in collecting every bucket, and send this rank's own buckets.

        Errors become a reason to stop. Only errors of collectives are raised: after them, the ranks are out of step.
        """
        buffers = None
        if self._owned:
            send = partial(transport.send, messages=of_sender)
            size = self.plan.largest_bucket(self._rank)
            buffers = DoubleBuffer(send, size, self._source.device, num_buffers=self._num_buffers)
        failed = False
        for bucket in self.plan.buckets:
            buffer = None
            if buffers is not None and bucket.owner == self._rank and not failed:
                buffer = buffers.take_buffer()
            try:
                self._source.fill(bucket, buffer[: bucket.nbytes] if buffer is not None else None)
            except A3poError as error:
                messages.stop(describe(error))
                # The other ranks do not know yet, and go on collecting with this one.
                failed, buffer = True, None
            except BaseException as error:
                messages.stop(f"rank {self._rank}: {describe(error)}")
                raise
            if buffers is not None and buffer is not None:
                buffers.put(bucket, buffer)
        try:
            if buffers is not None:
                buffers.finish()
        except Stopped:
            pass
        except EXPECTED as error:
            messages.stop(describe(error))

    def _deliver(self, fleet: Fleet, transport: Transport, version: int, messages: StoreMessages) -> None:
        """Have the servers take the buckets, check what they hold, and have them resume. On rank 0, in a thread."""
        try:
            transport.deliver(version, messages, self._timer)
            with self._timer.phase("publish/flush"):
                fleet.flush()
            with self._timer.phase("publish/checksums"):
                check_servers(fleet, version)
            with self._timer.phase("publish/resume"):
                fleet.confirm(version)
                fleet.resume()
        except Stopped:
            pass
        except EXPECTED as error:
            messages.stop(describe(error))
        except BaseException as error:
            messages.stop(describe(error))
            raise

    def _recover(self, version: int) -> str:
        """Free the servers after a failed attempt, and return what comes next (`Recovery`). On rank 0."""
        if self._fleet is None:
            return ""
        try:
            return self._fleet.recover(version)
        except EXPECTED:
            logger.exception("the servers could not be freed of version %d", version)
            return "failed"

    def _enough_answer(self) -> bool:
        """Return whether a fallback may help: enough servers answer, those in quarantine included."""
        return problem_of(lambda: self._settle_members("all")) is None

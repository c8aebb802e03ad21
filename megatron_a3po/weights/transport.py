"""Buckets through process groups of a sender and the rollout servers, beside the trainer's own groups."""

import itertools
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from megatron_a3po.errors import PublishError
from megatron_a3po.parallel.messages import broadcast_json, gather_json
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.types import update_group_name
from megatron_a3po.weights.buckets import Bucket
from megatron_a3po.weights.joining import in_daemon_thread, join_as_first, meeting_place, wait_for_all
from megatron_a3po.weights.plan import Plan, as_request
from megatron_a3po.weights.problems import as_publish_error, problem_of
from megatron_a3po.weights.receivers import WeightReceivers
from megatron_a3po.weights.signals import Signals

_group_numbers = itertools.count()
_POLL_SECONDS = 0.0005
_POLLS_PER_LOOK = 20


class UpdateGroups:
    """One group for each owner of buckets: rank 0 in it is the owner, then every rank of every server.

    On every rank. A server receives one bucket at a time: SGLang's scheduler stands still in its broadcast, and two
    servers that entered two groups in opposite order would wait for each other. So rank 0 announces all buckets to all
    servers in the plan's order, each when its owner has it ready, and the owner sends when it is told to. What owners
    do at the same time is to prepare.
    """

    why_not = "From now on, weights are published through the network"

    def __init__(
        self,
        plan: Plan,
        receivers: WeightReceivers | None,
        control: dist.ProcessGroup,
        *,
        run_id: str,
        backend: str,
        timeout_seconds: float,
    ) -> None:
        """Collective. `receivers` on rank 0. `run_id` (rank 0's counts): part of the groups' names, so that no two runs
        share one. Raises PublishError on every rank when a group cannot be built, and says which."""
        self._plan = plan
        self._receivers = receivers
        self._timeout_seconds = timeout_seconds
        self._backend = backend
        self._rank = dist.get_rank()
        self._group: dist.ProcessGroup | None = None
        self._pending: dist.Work | None = None
        self._left: tuple[Any, ...] = ()  # the end of a group with a broadcast in it would stop this process
        known = [receivers.urls, receivers.group_world_size, run_id] if receivers is not None else None
        self._urls, self._world_size, run_id = broadcast_json(known, control)
        # A name cannot be used again in one process, so it carries a number.
        self._names = {owner: update_group_name(run_id, next(_group_numbers)) for owner in plan.owners}
        for owner in plan.owners:
            # One after the other, so that no two servers wait in different groups.
            self._build(owner, control)

    def send(self, bucket: Bucket, buffer: Tensor, signals: Signals) -> None:
        """On the owner: broadcast a bucket when it is its turn. Returns when all servers have received it."""
        signals.tell(f"ready {bucket.number}")
        signals.wait_for(f"go {bucket.number}")
        self._pending = broadcast = dist.broadcast(buffer, group_src=0, group=self._group, async_op=True)
        assert broadcast is not None
        polls = 0
        while not broadcast.is_completed():
            # A server that refuses never joins, and the broadcast would wait for the group's timeout.
            polls += 1
            if polls % _POLLS_PER_LOOK == 0:
                signals.raise_if_stopped()
            time.sleep(_POLL_SECONDS)
        broadcast.wait()
        self._pending = None

    def deliver(self, version: int, signals: Signals, timer: PhaseTimer) -> None:
        """On rank 0: have every server receive and load all buckets, each when its owner has it ready."""
        assert self._receivers is not None
        for bucket in self._plan.buckets:
            with timer.phase("publish/prepare"):
                signals.wait_for(f"ready {bucket.number}", self._timeout_seconds, self._describe(bucket, "prepare"))
            if bucket.number == 0:
                with timer.phase("publish/pause"):
                    self._receivers.pause()
                    self._receivers.begin()
            with timer.phase("publish/send"), as_publish_error(self._describe(bucket, "publish")):
                self._announce(bucket, version, signals)
        with timer.phase("publish/finish"):
            self._receivers.end()

    def _announce(self, bucket: Bucket, version: int, signals: Signals) -> None:
        assert self._receivers is not None
        request = as_request(bucket, self._names[bucket.owner])
        # Version and flush go with the last bucket: before it, no server holds the new weights as a whole.
        last = bucket is self._plan.buckets[-1]
        request |= {"flush_cache": last} | ({"weight_version": str(version)} if last else {})
        answer = self._receivers.update(request, self._timeout_seconds)
        signals.tell(f"go {bucket.number}")
        wait_for_all([answer], signals, self._timeout_seconds)

    def _describe(self, bucket: Bucket, what: str) -> str:
        return f"rank {bucket.owner} could not {what} {bucket.title} for {', '.join(self._urls)}"

    def close(self) -> None:
        """All ranks, the servers' too, leave together."""
        left = [self._receivers.destroy_group(name) for name in self._names.values()] if self._receivers else []
        with as_publish_error(f"the weight-update groups with {', '.join(self._urls)} could not be ended"):
            if self._group is not None:
                dist.destroy_process_group(self._group)
            for answer in left:
                answer.result(self._timeout_seconds)

    def abandon(self) -> None:
        """After an error: free servers that still wait for a bucket, and end their session. May take the timeout."""
        if self._group is not None:
            self._group.abort()  # frees NCCL's ranks at once; gloo's wait until the timeout
            deadline = time.monotonic() + self._timeout_seconds
            while self._pending is not None and not self._pending.is_completed() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            self._left = self._group, self._pending
            self._group = None
        if self._receivers is not None and (problem := problem_of(self._receivers.end)) is not None:
            logger.debug("no weight update to end: %s", problem)

    def _build(self, owner: int, control: dist.ProcessGroup) -> None:
        place: list[Any] = []
        problem = None
        if self._rank == owner:
            problem = problem_of(lambda: place.extend(meeting_place(self._urls[0])))
        problem, place = gather_json([problem, place], control)[owner]
        if problem is None:
            signals = Signals(c10d._get_default_store(), self._names[owner])
            problem = problem_of(lambda: self._join_together(owner, place, signals))
            problem = next((text for text in gather_json(problem, control) if text is not None), None)
            signals.forget()
        if problem is not None:
            raise PublishError(
                f"the weight-update group of rank {owner} with {', '.join(self._urls)} could not be built: {problem}"
            )

    def _join_together(self, owner: int, place: list[Any], signals: Signals) -> None:
        """On rank 0 and the owner, which watch each other: a server that refuses never joins, and the owner would wait
        until the timeout."""
        address, port = place
        name = self._names[owner]
        waiting: list[Future[Any]] = []
        built: Future[dist.ProcessGroup] | None = None
        try:
            if self._receivers is not None:
                # A run that died and was resumed has left its group there.
                self._receivers.forget_group(name)
                waiting.append(self._receivers.create_group(name, address, port, self._backend, self._timeout_seconds))
            if self._rank == owner:
                built = in_daemon_thread(
                    partial(
                        join_as_first, name, (address, port), self._world_size, self._backend, self._timeout_seconds
                    )
                )
                waiting.append(built)
            wait_for_all(waiting, signals, self._timeout_seconds)
        except Exception as error:
            signals.stop(str(error) or type(error).__name__)
            raise
        self._group = built.result() if built is not None else self._group

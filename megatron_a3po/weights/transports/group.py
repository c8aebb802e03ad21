"""Send buckets through process groups of a sender and the rollout servers, beside the trainer's own groups."""

import itertools
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from megatron_a3po.errors import PublishError
from megatron_a3po.fleet.publication import Fleet, Members
from megatron_a3po.parallel.agreement import as_publish_error, on_rank_zero, problem_of
from megatron_a3po.parallel.messages import broadcast_json, gather_json
from megatron_a3po.runtime.background import in_background
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.types import update_group_name
from megatron_a3po.weights.plan import Bucket, Plan, as_request
from megatron_a3po.weights.store_messages import StoreMessages
from megatron_a3po.weights.transports.rendezvous import join_as_first, meeting_place, open_store, wait_for_all
from megatron_a3po.weights.wait_times import WaitTimes

_group_numbers = itertools.count()


class GroupTransport:
    """Sends through one process group per owner of buckets: rank 0 in it is the owner, then every rank of every server.

    Every rank of the trainer has one. A server receives one bucket at a time: SGLang's scheduler stands still in its
    broadcast, and two servers that entered two groups in opposite order would wait for each other. So rank 0 announces
    all buckets to all servers in the plan's order, each when its owner has it ready, and the owner sends when rank 0
    tells it to. Owners prepare their buckets at the same time.
    """

    fallback_note = "From now on, weights are published through the network"

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet | None,
        gloo_group: dist.ProcessGroup,
        *,
        run_id: str,
        backend: str,
        timeout_seconds: float,
        times: WaitTimes | None = None,
    ) -> None:
        """Collective. fleet: on rank 0. run_id: part of the groups' names, so that no two runs share one; rank 0's
        value is taken."""
        self._plan = plan
        self._fleet = fleet
        self._gloo_group = gloo_group
        self._timeout_seconds = timeout_seconds
        self._times = times or WaitTimes()
        self._backend = backend
        self._rank = dist.get_rank()
        self._run_id = broadcast_json(run_id, gloo_group)
        self._members: Members | None = None
        self._names: dict[int, str] = {}
        self._group: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None
        self._built: Future[dist.ProcessGroup] | None = None
        self._pending: Future[None] | None = None
        self._left: list[tuple[dist.ProcessGroup, Future[None] | None]] = []

    def prepare(self, members: Members) -> None:
        """Build the groups, unless those of the same members exist. Collective.

        Raises PublishError on every rank when a group cannot be built, and says which one.
        """
        if members == self._members:
            return
        self._leave()
        on_rank_zero(self._forget_groups, self._gloo_group, PublishError)
        self._members = members
        # A process cannot use a name twice, so it carries a number.
        self._names = {owner: update_group_name(self._run_id, next(_group_numbers)) for owner in self._plan.owners}
        for owner in self._plan.owners:
            # One after the other, so that no two servers wait in different groups.
            self._build(owner, members, self._gloo_group)

    def send(self, bucket: Bucket, buffer: Tensor, messages: StoreMessages) -> None:
        """Broadcast a bucket when its turn has come, on its owner. Returns when all servers have received it."""
        messages.tell(f"ready {bucket.number}")
        messages.wait_for(f"go {bucket.number}")
        # The broadcast has a thread of its own, because a server that refuses never joins it: gloo would wait until the
        # timeout, and NCCL's first broadcast for ever.
        self._pending = in_background(partial(_broadcast, buffer, self._group), "weight broadcast")
        wait_for_all([self._pending], messages, None, self._times)
        self._pending = None

    def deliver(self, version: int, messages: StoreMessages, timer: PhaseTimer) -> None:
        """Have every server receive and load all buckets, each when its owner has it ready. On rank 0."""
        assert self._fleet is not None
        for bucket in self._plan.buckets:
            with timer.phase("publish/prepare"):
                messages.wait_for(f"ready {bucket.number}", self._timeout_seconds, self._describe(bucket, "prepare"))
            if bucket.number == 0:
                with timer.phase("publish/pause"):
                    self._fleet.pause()
                    self._fleet.begin(version)
            with timer.phase("publish/send"), as_publish_error(self._describe(bucket, "publish")):
                self._announce(bucket, version, messages)
        with timer.phase("publish/finish"):
            self._fleet.end()

    def metrics(self) -> dict[str, float]:
        """Return no metrics of its own."""
        return {}

    def close(self) -> None:
        """Have all ranks of all groups leave together."""
        left = [self._fleet.destroy_group(name) for name in self._names.values()] if self._fleet else []

        def leave() -> None:
            if self._group is not None:
                dist.destroy_process_group(self._group)
            for answer in left:
                answer.result(self._timeout_seconds)

        if (problem := problem_of(leave)) is not None:
            # All weights have arrived, so a server that fails now does no harm.
            logger.warning("the weight-update groups with %s could not be ended: %s", self._urls, problem)

    def abandon(self) -> None:
        """Leave all groups after an error, before the servers are freed. The next attempt builds new ones."""
        self._leave()
        self._members, self._names = None, {}

    def _announce(self, bucket: Bucket, version: int, messages: StoreMessages) -> None:
        assert self._fleet is not None
        request = as_request(bucket, self._names[bucket.owner])
        # The version goes with the last bucket: before it, no server holds the new weights as a whole.
        last = bucket is self._plan.buckets[-1]
        request |= {"weight_version": str(version)} if last else {}
        answer = self._fleet.update(request, self._timeout_seconds)
        messages.tell(f"go {bucket.number}")
        wait_for_all([answer], messages, self._timeout_seconds, self._times)

    def _describe(self, bucket: Bucket, what: str) -> str:
        return f"rank {bucket.owner} could not {what} {bucket.title} for {self._urls}"

    @property
    def _urls(self) -> str:
        return ", ".join(self._members.urls) if self._members is not None else "no server"

    def _build(self, owner: int, members: Members, gloo_group: dist.ProcessGroup) -> None:
        place: list[Any] = []
        problem = None
        if self._rank == owner:
            problem = problem_of(lambda: place.extend(self._open(members.urls)))
        problem, place = gather_json([problem, place], gloo_group)[owner]
        if problem is None:
            messages = StoreMessages(c10d._get_default_store(), self._names[owner], self._times)
            problem = problem_of(lambda: self._join_together(owner, members, place, messages))
            problem = next((text for text in gather_json(problem, gloo_group) if text is not None), None)
            messages.forget()
        if problem is not None:
            self._end_rendezvous()
            raise PublishError(
                f"the weight-update group of rank {owner} with {self._urls} could not be built: {problem}"
            )

    def _open(self, urls: list[str]) -> tuple[str, int]:
        place = meeting_place(urls)
        self._store = open_store(place, self._timeout_seconds)
        return place

    def _join_together(self, owner: int, members: Members, place: list[Any], messages: StoreMessages) -> None:
        """Join on the owner, and have the servers join on rank 0. The two watch each other: a server that refuses never
        joins, and the owner would wait for it until the timeout."""
        address, port = place
        name = self._names[owner]
        waiting: list[Future[Any]] = []
        try:
            if self._fleet is not None:
                # A run that died and was resumed has left its group there.
                self._fleet.leave_stale_group(name)
                waiting.append(self._fleet.create_group(name, address, port, self._backend, self._timeout_seconds))
            if self._rank == owner:
                join = partial(
                    join_as_first,
                    name,
                    (address, port),
                    members.world_size,
                    self._backend,
                    store_timeout=self._timeout_seconds,
                    group_timeout=self._timeout_seconds + self._times.group_margin_seconds,
                )
                self._built = in_background(join, "weight-update group")
                waiting.append(self._built)
            wait_for_all(waiting, messages, self._timeout_seconds, self._times)
        except Exception as error:
            if self._fleet is not None:
                self._fleet.mark_failed()
            messages.stop(str(error) or type(error).__name__)
            raise
        if self._rank == owner and self._built is not None:
            self._group, self._built = self._built.result(), None

    def _end_rendezvous(self) -> None:
        """Close the meeting place. Collective, so that rank 0 gives up no server before the owner has let it go."""
        joining = [self._built] if self._built is not None else []
        wait(joining, self._times.late_server_seconds)
        self._store = None  # members that still wait there fail, this rank's thread too
        wait(joining, self._times.abort_seconds)
        gather_json(None, self._gloo_group)

    def _leave(self) -> None:
        """Leave this rank's group without the other members, some of which may be gone."""
        if self._group is not None:
            wait([in_background(self._group.abort, "weight-update group")], self._times.abort_seconds)
            self._left.append((self._group, self._pending))
        self._group = self._pending = self._store = None
        # To destroy a group while a broadcast is in it would stop this process.
        for left in [left for left in self._left if left[1] is None or left[1].done()]:
            self._left.remove(left)
            if (problem := problem_of(partial(dist.destroy_process_group, left[0]))) is not None:
                logger.debug("a group that was left: %s", problem)

    def _forget_groups(self) -> None:
        if self._fleet is not None:
            for name in self._names.values():
                self._fleet.leave_stale_group(name)


def _broadcast(buffer: Tensor, group: dist.ProcessGroup | None) -> None:
    """Send the buffer to the whole group. Returns when the bytes have left."""
    if buffer.is_cuda:
        torch.cuda.set_device(buffer.device)  # a new thread begins at the first one
    dist.broadcast(buffer, group_src=0, group=group)
    if buffer.is_cuda:
        torch.cuda.current_stream().synchronize()

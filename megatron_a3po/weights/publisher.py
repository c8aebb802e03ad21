"""A new weight version for every rollout server, or an error: never a half-updated model that goes on."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from megatron_a3po.config import PublishConfig
from megatron_a3po.errors import PublishError
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.plan import Bucket, split_into_buckets
from megatron_a3po.weights.transport import UpdateGroup, WeightReceivers, as_publish_error


class WeightPublisher:
    """On every rank; rank 0, which has the `receivers`, sends. A context manager."""

    def __init__(
        self,
        config: PublishConfig,
        gather: Callable[[], list[tuple[str, Tensor]]],
        receivers: WeightReceivers | None,
        *,
        backend: str,
        timer: PhaseTimer,
    ) -> None:
        """`gather`: every tensor with its Hugging Face name; collective. `backend`: gloo or nccl."""
        self._config = config
        self._gather = gather
        self._receivers = receivers
        self._timer = timer
        self._group = (
            UpdateGroup(receivers, backend=backend, timeout_seconds=config.timeout_seconds) if receivers else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error the servers' state is unknown: the next run's reset, or the server's end, clears it.
        if self._group is not None and error is None:
            self._group.close()

    def publish(self, version: int) -> None:
        """Give every server the present weights as `version`. Collective. Raises PublishError.

        On an error generation stays paused: a server that holds half of an update must not go on sampling.
        """
        with self._timer.phase("publish"):
            with self._timer.phase("publish/gather"):
                named_tensors = self._gather()
            if self._receivers is not None:
                with as_publish_error(f"version {version} was not published"):
                    self._send(named_tensors, version)

    def _send(self, named_tensors: list[tuple[str, Tensor]], version: int) -> None:
        assert self._receivers is not None and self._group is not None
        buckets = split_into_buckets(named_tensors, self._config.bucket_bytes)
        tensors = dict(named_tensors)
        if not tensors or len(tensors) != len(named_tensors):
            raise PublishError("no tensor to publish, or one comes twice; the model's names are broken")
        with self._timer.phase("publish/pause"):
            self._receivers.pause()
        with self._timer.phase("publish/send"):
            self._receivers.begin()
            for number, bucket in enumerate(buckets, 1):
                request = bucket.request(self._group.name)
                # Version and flush go with the last bucket: before it, no server holds the new weights as a whole.
                last = number == len(buckets)
                request |= {"flush_cache": last} | ({"weight_version": str(version)} if last else {})
                self._group.send(request, _flatten(bucket, tensors))
            self._receivers.end()
        with self._timer.phase("publish/checksums"):
            self._compare_servers(version)
        with self._timer.phase("publish/resume"):
            self._receivers.resume()

    def _compare_servers(self, version: int) -> None:
        """A 200 does not prove that a server loaded what it received; equal checksums on all servers are evidence."""
        assert self._receivers is not None
        if len(self._receivers.urls) < 2:
            return
        first_of_size: dict[int, tuple[str, list[dict[str, str]]]] = {}
        for url, ranks in zip(self._receivers.urls, self._receivers.checksums(), strict=True):
            # Servers of another tensor-parallel size hold other shards.
            first_url, first_ranks = first_of_size.setdefault(len(ranks), (url, ranks))
            differing = {
                name
                for first, other in zip(first_ranks, ranks, strict=True)
                for name in first.keys() | other.keys()
                if first.get(name) != other.get(name)
            }
            if differing:
                raise PublishError(
                    f"version {version}: {url} and {first_url} hold different weights in {len(differing)} tensors, "
                    f"such as {', '.join(sorted(differing)[:3])}"
                )


def _flatten(bucket: Bucket, tensors: dict[str, Tensor]) -> Tensor:
    """The bucket's bytes, [bytes] uint8."""
    return torch.cat([tensors[name].contiguous().view(-1).view(torch.uint8) for name in bucket.names])

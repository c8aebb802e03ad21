"""A new weight version for every rollout server, or an error: never a half-updated model that goes on."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megatron_a3po.config import PublishConfig
from megatron_a3po.errors import PublishError
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.plan import Bucket, split_into_buckets
from megatron_a3po.weights.transport import UpdateGroup, WeightReceivers


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
                self._send(named_tensors, version)

    def _send(self, named_tensors: list[tuple[str, Tensor]], version: int) -> None:
        assert self._receivers is not None and self._group is not None
        buckets = split_into_buckets(named_tensors, self._config.bucket_bytes)
        tensors = dict(named_tensors)
        if len(tensors) != len(named_tensors):
            raise PublishError("a tensor is published twice; the model's names are broken")
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
        with self._timer.phase("publish/verify"):
            self._compare_servers(version)
        with self._timer.phase("publish/resume"):
            self._receivers.resume()

    def _compare_servers(self, version: int) -> None:
        """A 200 does not prove that a server loaded what it received; equal checksums on all servers are evidence."""
        assert self._receivers is not None
        if len(self._receivers.urls) < 2:
            return
        first, *others = self._receivers.checksums()
        for url, other in zip(self._receivers.urls[1:], others, strict=True):
            if other != first:
                raise PublishError(
                    f"version {version}: the weights of {url} differ from those of {self._receivers.urls[0]} "
                    f"({_differing(first, other)})"
                )


def _differing(first: Any, other: Any) -> str:
    """A few of the entries in which two nested answers differ."""
    if isinstance(first, dict) and isinstance(other, dict):
        names = [name for name in first.keys() | other.keys() if first.get(name) != other.get(name)]
        inner = next((first.get(name) for name in names if isinstance(first.get(name), dict | list)), None)
        if inner is not None:
            return _differing(inner, next(other.get(name) for name in names if first.get(name) is inner))
        return ", ".join(sorted(names)[:5])
    if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        return next(_differing(a, b) for a, b in zip(first, other, strict=True) if a != b)
    return f"{first!r} and {other!r}"


def _flatten(bucket: Bucket, tensors: dict[str, Tensor]) -> Tensor:
    """The bucket's bytes, [bytes] uint8."""
    return torch.cat([tensors[name].contiguous().view(-1).view(torch.uint8) for name in bucket.names])

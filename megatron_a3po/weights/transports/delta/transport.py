"""Publish through files of what has changed, which rollout machines turn into folders of their own."""

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megatron_a3po.fleet.publication import Fleet, Members
from megatron_a3po.hf.output import HfOutput
from megatron_a3po.runtime.files import FileLock, write_durably
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.plan import Bucket, Plan
from megatron_a3po.weights.store_messages import StoreMessages
from megatron_a3po.weights.transports.delta.folder import MODEL, PUBLISHED, Published, lock_local, make_local_folder
from megatron_a3po.weights.transports.delta.followers import wait_for_followers
from megatron_a3po.weights.transports.delta.writer import OwnedShard, Written
from megatron_a3po.weights.transports.disk import (
    FOLDER,
    FileSettings,
    announced_folder,
    lock_published,
    shards_of,
    wait_for_bucket,
)


class DeltaTransport:
    """Sends each bucket as a file: the whole, or what has changed since the last version. On every rank.

    To compare, an owner keeps a copy of its buckets in host memory.
    """

    def __init__(self, plan: Plan, fleet: Fleet | None, settings: FileSettings, *, local: Path, followed: bool) -> None:
        """fleet: on rank 0. local: where servers find the versions on their machines. followed: whether
        tools/apply_weight_delta.py makes them there, or rank 0 does; either way within the settings' timeout."""
        self._fleet = fleet
        self._settings = settings
        self._local = local
        self._followed = followed
        self.fallback_note = (
            f"From now on, weights are published through files in {settings.folder}; find out why the servers could "
            "not be reached through the network"
        )
        self._pause_first = settings.pause_first
        self._buckets = plan.buckets
        self._shards = shards_of(plan)
        self._start = f"start_{secrets.token_hex(4)}"
        self._owned: dict[int, OwnedShard] = {}
        self._metrics: dict[str, float] = {}
        self._locks: list[FileLock] = []

    def prepare(self, members: Members) -> None:
        """Do nothing: `deliver` tells the servers where to read."""

    def send(self, bucket: Bucket, buffer: Tensor, messages: StoreMessages) -> None:
        """Write a bucket, or what has changed in it. On its owner."""
        folder = announced_folder(messages, bucket.owner)
        name = self._shards[bucket.number].file_name
        owned = self._owned.setdefault(bucket.number, OwnedShard(name, bucket.tensors))
        messages.tell(f"ready {bucket.number}", owned.write(folder, buffer).model_dump_json())

    def deliver(self, version: int, messages: StoreMessages, timer: PhaseTimer) -> None:
        """Have all servers read their machine's folder, when it holds the version. On rank 0."""
        assert self._fleet is not None
        self._take_folders()
        settings = self._settings
        folder = settings.folder.resolve()
        start = folder / self._start
        if self._pause_first:
            self._fleet.pause()
            self._pause_first = False
        with timer.phase("publish/write"):
            self._describe(start / MODEL)
            messages.tell(FOLDER, str(start))
            told = [wait_for_bucket(bucket, messages, settings) for bucket in self._buckets]
            written = [Written.model_validate_json(text) for text in told]
            published = Published(version=version, start=self._start, shards=tuple(each.shard for each in written))
            write_durably(folder / PUBLISHED, published.model_dump_json() + "\n")
        self._metrics = _metrics(written)
        with timer.phase("publish/apply"):
            if self._followed:
                wait_for_followers(folder, published, settings.timeout_seconds, messages.raise_if_stopped)
            else:
                make_local_folder(folder, self._local, published)
        with timer.phase("publish/pause"):
            self._fleet.pause()
        with timer.phase("publish/load"):
            target = self._local.absolute() / published.folder_name
            self._fleet.update_from_disk(str(target), str(version), settings.timeout_seconds)
        _remove_unused(folder, published)

    def metrics(self) -> dict[str, float]:
        """Return, for the last version, how many bytes the owners have written, and the share of changed elements in
        buckets that they had written before. On rank 0."""
        return self._metrics

    def close(self) -> None:
        """Release the folders. The last version stays."""
        for lock in self._locks:
            lock.release()

    def abandon(self) -> None:
        """Do nothing: an attempt leaves nothing open at the servers."""

    def _take_folders(self) -> None:
        """Lock the folders, once. Raises ConfigError."""
        if not self._locks:
            self._locks.append(lock_published(self._settings.folder))
        if not self._followed and len(self._locks) == 1:
            self._locks.append(lock_local(self._local))

    def _describe(self, target: Path) -> None:
        if not target.is_dir():
            settings = self._settings
            output = HfOutput(target=target, source=settings.model, quantization_config=settings.quantization_config)
            output.begin()
            output.finish(self._shards, elsewhere=True)


def _metrics(written: Sequence[Written]) -> dict[str, float]:
    num_compared = sum(each.num_compared for each in written)
    density = {"publish_density": sum(each.num_changed for each in written) / num_compared} if num_compared else {}
    return {"publish_written_bytes": float(sum(each.nbytes for each in written)), **density}


def _remove_unused(folder: Path, published: Published) -> None:
    """Remove files of earlier versions and of earlier starts of the run."""
    used = {MODEL, *(file for shard in published.shards for file in shard.files)}
    unused = [path for path in (folder / published.start).iterdir() if path.name not in used]
    for path in (*unused, *(path for path in folder.glob("start_*") if path.name != published.start)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

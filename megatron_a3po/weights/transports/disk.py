"""Publish through files: write a Hugging Face folder of each version, which every server reads.

FOLDER/version_00000017/     the last version, until the next one is published
FOLDER/publish.lock          held by the run that publishes
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_a3po.errors import PublishError
from megatron_a3po.fleet.publication import Fleet, Members
from megatron_a3po.hf.output import HfOutput
from megatron_a3po.hf.safetensors_writer import SafetensorsWriter
from megatron_a3po.hf.shards import ShardFile, shard_name
from megatron_a3po.runtime.files import FileLock
from megatron_a3po.runtime.run_dir import lock_folder
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.plan import Bucket, Plan
from megatron_a3po.weights.store_messages import StoreMessages

FOLDER = "folder"
"""Key of the message that tells owners where to write"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSettings:
    """Where and how versions are written to files."""

    folder: Path
    """publish.folder, which all owners and all servers see"""
    model: Path
    """Hugging Face folder whose tokenizer and configuration go beside the weights"""
    quantization_config: Mapping[str, Any] | None = None
    """What config.json says about FP8; None: the servers hold none"""
    pause_first: bool = False
    """Pause the servers once before anything is written, to notice early that a server is gone"""
    timeout_seconds: float
    """For an owner to write a bucket, and for the servers to read the folder"""


def shards_of(plan: Plan) -> list[ShardFile]:
    """Return the files of the plan, one for each bucket."""
    names = [shard_name(bucket.number + 1, len(plan.buckets)) for bucket in plan.buckets]
    return [ShardFile(file_name=name, tensors=bucket.tensors) for name, bucket in zip(names, plan.buckets, strict=True)]


def wait_for_bucket(bucket: Bucket, messages: StoreMessages, settings: FileSettings) -> str:
    """Wait on rank 0 until the owner has written the bucket, and return what it says.

    Raises Stopped, and PublishError after the timeout.
    """
    what = f"rank {bucket.owner} could not write {bucket.title} to {settings.folder}"
    return messages.wait_for(f"ready {bucket.number}", settings.timeout_seconds, what)


def announced_folder(messages: StoreMessages, owner: int) -> Path:
    """Wait until rank 0 tells the folder to write to. Raises PublishError if this rank does not see it."""
    folder = Path(messages.wait_for(FOLDER))
    if not folder.is_dir():
        raise PublishError(f"rank {owner} does not see {folder}; publish.folder must be on shared storage")
    return folder


def lock_published(folder: Path) -> FileLock:
    """Lock `publish.folder` for this run, whose publications remove everything else there. Raises ConfigError."""
    folder.mkdir(parents=True, exist_ok=True)
    return lock_folder(folder, "publish.folder", "publish.lock")


class DiskTransport:
    """Sends through a folder that all owners and servers see: owners write each bucket as a file. On every rank."""

    def __init__(self, plan: Plan, fleet: Fleet | None, settings: FileSettings) -> None:
        """fleet: on rank 0."""
        self._fleet = fleet
        self._settings = settings
        self._pause_first = settings.pause_first
        self.fallback_note = (
            f"From now on, weights are published through files in {settings.folder}, which is slower; find out why the "
            "servers could not be reached through the network"
        )
        self._buckets = plan.buckets
        self._shards = shards_of(plan)
        self._lock: FileLock | None = None

    def prepare(self, members: Members) -> None:
        """Do nothing: `deliver` tells the servers where to read."""

    def send(self, bucket: Bucket, buffer: Tensor, messages: StoreMessages) -> None:
        """Write a bucket. On its owner."""
        folder = announced_folder(messages, bucket.owner)
        shard = self._shards[bucket.number]
        with SafetensorsWriter(folder / shard.file_name, shard.tensors) as writer:
            for name, tensor in bucket.views(buffer.cpu()).items():
                writer.append(name, tensor)
        messages.tell(f"ready {bucket.number}")

    def deliver(self, version: int, messages: StoreMessages, timer: PhaseTimer) -> None:
        """Have all servers read the folder, when all owners have written to it. On rank 0."""
        assert self._fleet is not None
        settings = self._settings
        self._lock = self._lock or lock_published(settings.folder)
        target = (settings.folder / f"version_{version:08d}").resolve()
        output = HfOutput(
            target=target, source=settings.model, quantization_config=settings.quantization_config, replace=True
        )
        if self._pause_first:
            self._fleet.pause()
            self._pause_first = False
        with timer.phase("publish/write"):
            output.begin(self._shards)
            messages.tell(FOLDER, str(output.folder))
            for bucket in self._buckets:
                wait_for_bucket(bucket, messages, settings)
            output.finish(self._shards)
        with timer.phase("publish/pause"):
            self._fleet.pause()
        with timer.phase("publish/load"):
            self._fleet.update_from_disk(str(target), str(version), settings.timeout_seconds)
        for former in target.parent.glob("*version_*"):
            if former != target:
                shutil.rmtree(former, ignore_errors=True)

    def metrics(self) -> dict[str, float]:
        """Return no metrics of its own."""
        return {}

    def close(self) -> None:
        """Release the folder. The last version stays, so that servers can be started on it."""
        if self._lock is not None:
            self._lock.release()

    def abandon(self) -> None:
        """Do nothing: an attempt leaves nothing open at the servers."""

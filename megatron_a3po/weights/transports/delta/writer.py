"""Write a bucket on its owner: the whole, or what has changed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel
from torch import Tensor

from megatron_a3po.hf.safetensors_format import TensorSpec, make_header
from megatron_a3po.hf.safetensors_writer import SafetensorsWriter
from megatron_a3po.weights.transports.delta.encoding import Delta, as_words, make_delta
from megatron_a3po.weights.transports.delta.folder import Change, PublishedShard, Whole, checksum


class Written(BaseModel):
    """What an owner tells rank 0 about a bucket that it wrote."""

    shard: PublishedShard
    nbytes: int
    """Size of the files that were written for this version"""
    num_compared: int
    """Elements; 0 when there was nothing to compare with"""
    num_changed: int


class OwnedShard:
    """One bucket on its owner, with its last published bytes in host memory."""

    def __init__(self, name: str, tensors: Sequence[TensorSpec]) -> None:
        """name: of the file in Hugging Face folders. tensors: in the order of their bytes."""
        self._stem = name.removesuffix(".safetensors")
        self._name = name
        self._tensors = tensors
        self._former: Tensor | None = None
        self._shard: PublishedShard | None = None
        self._num_files = 0

    def write(self, folder: Path, buffer: Tensor) -> Written:
        """Write to `folder` what it lacks of the bucket's bytes `buffer` [bytes] uint8. Raises CheckpointError."""
        new = buffer.to("cpu", copy=True)
        former, shard = self._former, self._shard
        if former is None or shard is None or not all((folder / file).is_file() for file in shard.files):
            shard, nbytes = self._write_whole(folder, new)
            num_compared = num_changed = 0
        else:
            words = as_words(new, self._tensors)
            num_compared = words.numel()
            num_changed, delta = make_delta(as_words(former, self._tensors), words)
            if delta is None:
                shard, nbytes = self._write_whole(folder, new)
            elif num_changed:
                shard, nbytes = self._write_delta(folder, new, delta, shard)
            else:
                nbytes = 0
        self._former, self._shard = new, shard
        return Written(shard=shard, nbytes=nbytes, num_compared=num_compared, num_changed=num_changed)

    def _write_whole(self, folder: Path, new: Tensor) -> tuple[PublishedShard, int]:
        tensors, start = {}, 0
        for spec in self._tensors:
            tensors[spec.name] = new[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)
            start += spec.nbytes
        file, nbytes = self._write_file(folder, "whole", tensors)
        return PublishedShard(name=self._name, whole=Whole(file=file, checksum=self._checksum(new))), nbytes

    def _write_delta(
        self, folder: Path, new: Tensor, delta: Delta, former: PublishedShard
    ) -> tuple[PublishedShard, int]:
        # A reader that holds nothing reads at most twice the shard, and changes never cost more than whole shards.
        is_full = sum(each.nbytes for each in former.changes) + delta.nbytes > new.nbytes
        if is_full and 2 * delta.nbytes > new.nbytes:
            return self._write_whole(folder, new)
        file, nbytes = self._write_file(folder, "delta", delta.tensors())
        change = Change(file=file, base=former.checksum, checksum=self._checksum(new), nbytes=delta.nbytes)
        if not is_full:
            return former.model_copy(update={"changes": (*former.changes, change)}), nbytes
        # A reader that holds the version before needs the last change only.
        shard, whole_nbytes = self._write_whole(folder, new)
        return shard.model_copy(update={"changes": (change,)}), nbytes + whole_nbytes

    def _write_file(self, folder: Path, kind: str, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
        path = folder / f"{self._stem}.{self._num_files}.{kind}.safetensors"
        self._num_files += 1
        specs = [TensorSpec(name=name, dtype=each.dtype, shape=tuple(each.shape)) for name, each in tensors.items()]
        with SafetensorsWriter(path, specs) as writer:
            for name, tensor in tensors.items():
                writer.append(name, tensor)
        return path.name, path.stat().st_size

    def _checksum(self, new: Tensor) -> str:
        return checksum(make_header(self._tensors), new)

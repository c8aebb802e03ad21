"""Export the policy as an ordinary, unquantised Hugging Face folder."""

from collections import deque
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from megatron_a3po.errors import CheckpointError
from megatron_a3po.hf.output import HfOutput
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.hf.safetensors_writer import GrowingSafetensorsWriter
from megatron_a3po.hf.shards import MAX_SHARD_BYTES, ShardFile, shard_name


def save_hf_folder(named_tensors: Iterable[tuple[str, Tensor]], source: Path, target: Path, *, rank: int) -> None:
    """Write the tensors to the folder `target` as safetensors of 5 GB, with the other files of `source`, on rank 0.

    `named_tensors` may be a collective generator: all ranks exhaust it, and at most one tensor is in memory besides
    what it holds. It must not yield quantised tensors, since config.json of the folder has no quantization_config. The
    folder appears under its name when it is whole, and replaces a former one. Raises ConfigError for folders that
    cannot be used, and CheckpointError when the folder cannot be written or a name comes twice.
    """
    if rank != 0:
        deque(named_tensors, maxlen=0)  # exhausts it and keeps no tensor
        return
    output = HfOutput(target=target, source=source, replace=True)
    output.begin()
    output.finish(_write_shards(named_tensors, output.folder, MAX_SHARD_BYTES))


def _write_shards(named_tensors: Iterable[tuple[str, Tensor]], folder: Path, max_shard_bytes: int) -> list[ShardFile]:
    """Write the tensors as they come, and name the files at the end, since the names contain their number."""
    parts: list[tuple[Path, tuple[TensorSpec, ...]]] = []
    names: set[str] = set()
    writer: GrowingSafetensorsWriter | None = None
    for name, tensor in named_tensors:
        if name in names:
            raise CheckpointError(f"{name} comes twice; the model's names are broken")
        names.add(name)
        spec = TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
        if writer and (writer.nbytes + spec.nbytes > max_shard_bytes or not writer.has_room(spec)):
            parts.append((writer.path, writer.complete()))
            writer = None
        writer = writer or GrowingSafetensorsWriter(folder / f"part-{len(parts):05d}.safetensors")
        writer.append(name, tensor)
        del tensor  # before the next one is gathered
    if writer:
        parts.append((writer.path, writer.complete()))
    shards = []
    for number, (path, tensors) in enumerate(parts, 1):
        shards.append(ShardFile(file_name=shard_name(number, len(parts)), tensors=tensors))
        path.rename(folder / shards[-1].file_name)
    return shards

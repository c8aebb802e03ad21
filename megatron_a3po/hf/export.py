"""The policy as an ordinary Hugging Face folder."""

from collections import deque
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from megatron_a3po.errors import CheckpointError
from megatron_a3po.hf.output import HfOutput
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.hf.safetensors_writer import GrowingSafetensorsWriter
from megatron_a3po.hf.shards import MAX_SHARD_BYTES, Shard, shard_name


def save_hf_folder(named_tensors: Iterable[tuple[str, Tensor]], source: Path, target: Path, *, rank: int) -> None:
    """Rank 0 writes the tensors as safetensors (shards of 5 GB) with the other files of `source`, as they come.

    All ranks go through `named_tensors`, which may be a generator that gathers; at most one tensor is in memory besides
    what it holds. The folder appears under its name when it is whole, in the place of a former one. Raises ConfigError
    and CheckpointError.
    """
    if rank != 0:
        deque(named_tensors, maxlen=0)  # keeps none of them
        return
    output = HfOutput(target=target, source=source, replace=True)
    output.begin()
    output.finish(_write_shards(named_tensors, output.folder, MAX_SHARD_BYTES))


def _write_shards(named_tensors: Iterable[tuple[str, Tensor]], folder: Path, max_shard_bytes: int) -> list[Shard]:
    """Their number, which is part of their names, is known at the end."""
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
        shards.append(Shard(file_name=shard_name(number, len(parts)), tensors=tensors))
        path.rename(folder / shards[-1].file_name)
    return shards

"""The shards of a whole Megatron parameter: which ranks hold them, and how they are merged. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megatron_a3po.errors import PublishError
from megatron_a3po.hf.safetensors_format import TensorSpec

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters whose rows are padded, so that every tensor-parallel rank holds equally many"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShard:
    """What one rank holds of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: int = 1
    """Megatron's `partition_stride`: 2 for a gated MLP's first layer, of which every rank holds a part of the gates and
    a part of the rest; 1 for everything else"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holdings:
    """What one rank holds, as it reports to the others."""

    rank: int
    stage: int
    """The rank's pipeline stage"""
    tensor_group: tuple[int, ...]
    """The ranks that share its parameters, in the order of the shards"""
    expert_group: tuple[int, ...]
    """The ranks that share its experts"""
    shards: Mapping[str, ParameterShard]
    """By Megatron's names in the whole model"""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object for the other ranks."""
        return {
            "rank": self.rank,
            "stage": self.stage,
            "tensor_group": self.tensor_group,
            "expert_group": self.expert_group,
            "shards": {
                name: [shard.shape, str(shard.dtype).removeprefix("torch."), shard.stride]
                for name, shard in self.shards.items()
            },
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Read what `to_json` returned."""
        return cls(
            rank=content["rank"],
            stage=content["stage"],
            tensor_group=tuple(content["tensor_group"]),
            expert_group=tuple(content["expert_group"]),
            shards={
                name: ParameterShard(shape=tuple(shape), dtype=getattr(torch, dtype), stride=stride)
                for name, (shape, dtype, stride) in content["shards"].items()
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedParameter:
    """A whole Megatron parameter that is merged from shards at its owner."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole, without padding"""
    owner: int
    """The rank that merges the shards"""
    ranks: tuple[int, ...]
    """The ranks that send a shard, in the order of the shards"""
    shard: ParameterShard
    axis: int
    """The axis along which the shards follow each other"""
    is_expert: bool
    """True if the owner's expert-parallel group holds it, and not its tensor-parallel group"""

    @property
    def shard_bytes(self) -> int:
        return torch.Size(self.shard.shape).numel() * self.shard.dtype.itemsize

    def describe(self) -> list[Any]:
        """Return a JSON value that is equal on two ranks if they plan the same."""
        return [self.name, self.shape, self.owner, self.ranks, self.shard.shape, str(self.shard.dtype), self.axis]

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter without padding; a view of the shard if there is only one."""
        if len(shards) == 1:
            whole = shards[0]
        else:
            pieces = [shard.chunk(self.shard.stride, self.axis) for shard in shards]
            ordered = [pieces[rank][turn] for turn in range(self.shard.stride) for rank in range(len(shards))]
            whole = torch.cat(ordered, self.axis)
        return whole.narrow(0, 0, self.shape[0]) if self.shape else whole


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPart:
    """Parameters that become Hugging Face tensors together, and where their shards are."""

    number: int
    """Position in the model"""
    parameters: tuple[ShardedParameter, ...]
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def locate_parameter(name: str, shape: tuple[int, ...], ranks: Sequence[Holdings]) -> ShardedParameter:
    """Find the shards of the parameter `name` of the whole `shape`, among what the ranks hold.

    Raises PublishError, which names the parameter and the rank at fault.
    """
    stages = [held.stage for held in ranks if name in held.shards]
    if not stages:
        raise PublishError(f"no rank holds the parameter {name}")
    owner = next(held for held in ranks if held.stage == min(stages))
    if name in owner.shards:
        return _from_tensor_group(name, shape, owner, ranks)
    holders = {rank: ranks[rank].shards[name] for rank in owner.expert_group if name in ranks[rank].shards}
    if [shard.shape for shard in holders.values()] != [shape]:
        where = ", ".join(f"{list(shard.shape)} on rank {rank}" for rank, shard in holders.items())
        raise PublishError(
            f"rank {owner.rank} does not hold the parameter {name}, so one rank of its expert-parallel group "
            f"{list(owner.expert_group)} should hold the whole of shape {list(shape)}; found: {where or 'nothing'}"
        )
    ((holder, shard),) = holders.items()
    return ShardedParameter(
        name=name, shape=shape, owner=owner.rank, ranks=(holder,), shard=shard, axis=0, is_expert=True
    )


def _from_tensor_group(
    name: str, shape: tuple[int, ...], owner: Holdings, ranks: Sequence[Holdings]
) -> ShardedParameter:
    shard = owner.shards[name]
    alone = ShardedParameter(
        name=name, shape=shape, owner=owner.rank, ranks=(owner.rank,), shard=shard, axis=0, is_expert=False
    )
    if shard.shape == shape:
        return alone
    group = owner.tensor_group
    for rank in group:
        if ranks[rank].shards.get(name) != shard:
            raise PublishError(
                f"rank {rank} holds {ranks[rank].shards.get(name)} of the parameter {name}, rank {owner.rank} {shard}"
            )
    different = [
        axis for axis, size in enumerate(shape) if len(shard.shape) == len(shape) and shard.shape[axis] != size
    ]
    axis = different[0] if len(different) == 1 else 0
    found = shard.shape[axis] * len(group) if shard.shape else 0
    padded = name.endswith(_VOCABULARY) and axis == 0 and found >= shape[0]
    if len(different) != 1 or (found != shape[axis] and not padded) or shard.shape[axis] % shard.stride:
        raise PublishError(_wrong_shape(name, shape, [shard] * len(group), group))
    return ShardedParameter(
        name=name, shape=shape, owner=owner.rank, ranks=group, shard=shard, axis=axis, is_expert=False
    )


def _wrong_shape(name: str, shape: tuple[int, ...], shards: Sequence[ParameterShard], ranks: Sequence[int]) -> str:
    held = ", ".join(f"{list(shard.shape)} on rank {rank}" for rank, shard in zip(ranks, shards, strict=True))
    return (
        f"the parameter {name} has the shape {list(shape)} in config.json, which its shards do not make up: {held} "
        "(experts cut by tensor parallelism cannot be published)"
    )


def refuse_different_replicas(ranks: Sequence[Holdings]) -> None:
    """Raise PublishError, with parameter and rank, if ranks at the same place of the model hold different shards."""
    first_at: dict[tuple[int, int, int], Holdings] = {}
    for held in ranks:
        place = (held.stage, held.tensor_group.index(held.rank), held.expert_group.index(held.rank))
        first = first_at.setdefault(place, held)
        for name in dict.fromkeys((*first.shards, *held.shards)):
            if first.shards.get(name) != held.shards.get(name):
                raise PublishError(
                    f"rank {held.rank} holds {held.shards.get(name)} of the parameter {name}, rank {first.rank}, which "
                    f"is at the same place of the model, {first.shards.get(name)}"
                )

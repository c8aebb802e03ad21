"""Where the shards of a whole Megatron parameter lie, and how they are put together. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megatron_a3po.errors import PublishError
from megatron_a3po.hf.safetensors_format import TensorSpec

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters whose rows are padded, so that every tensor-parallel rank has as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShard:
    """What one rank holds of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: int = 1
    """Megatron's `partition_stride`: of a gated MLP's first layer, every rank has a part of the gates and one of the
    rest (2); of all else, one part (1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holdings:
    """What one rank says about itself."""

    rank: int
    stage: int
    """of the pipeline"""
    tensor_group: tuple[int, ...]
    """the ranks that share its parameters, in the order of the shards"""
    expert_group: tuple[int, ...]
    """the ranks that share its experts"""
    shards: Mapping[str, ParameterShard]
    """by Megatron's names in the whole model"""

    def to_json(self) -> dict[str, Any]:
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
    """A whole Megatron parameter as its shards."""

    name: str
    shape: tuple[int, ...]
    """of the whole, without padding"""
    owner: int
    """the rank that puts it together"""
    ranks: tuple[int, ...]
    """who sends a shard, in the order of the shards"""
    shard: ParameterShard
    axis: int
    """along which the shards follow each other"""
    is_expert: bool
    """held by the expert-parallel group of the owner, not by its tensor-parallel group"""

    @property
    def shard_bytes(self) -> int:
        return torch.Size(self.shard.shape).numel() * self.shard.dtype.itemsize

    def describe(self) -> list[Any]:
        return [self.name, self.shape, self.owner, self.ranks, self.shard.shape, str(self.shard.dtype), self.axis]

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole parameter; a view where one shard is the whole. Padding is cut off."""
        if len(shards) == 1:
            whole = shards[0]
        else:
            pieces = [shard.chunk(self.shard.stride, self.axis) for shard in shards]
            ordered = [pieces[rank][turn] for turn in range(self.shard.stride) for rank in range(len(shards))]
            whole = torch.cat(ordered, self.axis)
        return whole.narrow(0, 0, self.shape[0]) if self.shape else whole


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPart:
    number: int
    """in the model"""
    parameters: tuple[ShardedParameter, ...]
    """of its Megatron parameters"""
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def locate_parameter(name: str, shape: tuple[int, ...], ranks: Sequence[Holdings]) -> ShardedParameter:
    """Raises PublishError, which names the parameter and the rank that is at fault."""
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
            f"rank {owner.rank} does not hold the parameter {name}; so one rank of its expert-parallel group "
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
        f"the parameter {name} has the shape {list(shape)} by config.json, which its shards do not make up: {held} "
        "(experts cut by tensor parallelism cannot be published)"
    )


def refuse_different_replicas(ranks: Sequence[Holdings]) -> None:
    """Ranks at the same place of the model hold the same. Raises PublishError with the parameter and the rank."""
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

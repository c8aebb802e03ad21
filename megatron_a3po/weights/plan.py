"""Which rank sends which Hugging Face tensor, made of which shards, in which bucket. Pure: no process group, no model.

Every rank tells what it holds; from that, every rank computes the same plan. A pipeline stage has one owner, its first
rank, which collects the stage's parameters from its tensor-parallel and expert-parallel groups and sends the tensors.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_a3po.errors import PublishError
from megatron_a3po.hf.quantize import SCALE_SUFFIX
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.weights.buckets import Bucket, split_into_buckets
from megatron_a3po.weights.shards import Holdings, PlannedPart, find_source, refuse_different_replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSpec:
    """Megatron parameters that become Hugging Face tensors together; see `skeleton.Part`."""

    shapes: Mapping[str, tuple[int, ...]]
    """of the whole parameters, without padding, by Megatron's names"""
    tensors: tuple[TensorSpec, ...]
    """as they are published"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The same on every rank."""

    buckets: tuple[Bucket, ...]
    """in the order in which servers receive them"""
    parts: tuple[PlannedPart, ...]

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The sending ranks, one for each pipeline stage."""
        return tuple(dict.fromkeys(bucket.owner for bucket in self.buckets))

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor for bucket in self.buckets for tensor in bucket.tensors)

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def largest_bucket(self, owner: int) -> int:
        """Bytes; 0 for a rank that owns none."""
        return max((bucket.nbytes for bucket in self.buckets if bucket.owner == owner), default=0)

    def digest(self) -> str:
        """Equal where the plans are."""
        described = [
            [bucket.owner, [(spec.name, str(spec.dtype), spec.shape) for spec in bucket.tensors], bucket.pieces]
            for bucket in self.buckets
        ]
        sources = [[source.describe() for source in part.sources] for part in self.parts]
        return hashlib.sha256(json.dumps([described, sources]).encode()).hexdigest()


def make_plan(parts: Sequence[PartSpec], ranks: Sequence[Holdings], *, bucket_bytes: int) -> Plan:
    """`parts`: the whole model; `ranks`: what every rank holds, in order.

    Raises PublishError, which names rank and parameter, for a parameter that no rank or only some of its ranks hold,
    for shards that do not make up the whole, for ranks that hold what the model does not have, and for a name that
    comes twice.
    """
    known = {name: shape for part in parts for name, shape in part.shapes.items()}
    for held in ranks:
        for name in held.shards:
            if name not in known:
                raise PublishError(f"rank {held.rank} holds {name}, which is no parameter of the model in config.json")
    refuse_different_replicas(ranks)
    _refuse_repeated_names([tensor.name for part in parts for tensor in part.tensors])
    planned = [
        PlannedPart(
            number=number,
            sources=tuple(find_source(name, shape, ranks) for name, shape in part.shapes.items()),
            tensors=part.tensors,
        )
        for number, part in enumerate(parts)
    ]
    by_owner: dict[int, list[PlannedPart]] = {}
    for part in planned:
        owners = {source.owner for source in part.sources}
        if len(owners) > 1:
            raise PublishError(f"{part.tensors[0].name} is made of parameters of the ranks {sorted(owners)}")
        by_owner.setdefault(owners.pop(), []).append(part)
    queues = [split_into_buckets(owner, by_owner[owner], bucket_bytes) for owner in sorted(by_owner)]
    return Plan(buckets=_take_turns(queues), parts=tuple(planned))


def refuse_other_names(parts: Sequence[PartSpec], expected: Sequence[str]) -> None:
    """Raises PublishError unless the tensors (in FP8 or not) are those of the model's own weight files."""
    planned = {spec.name for part in parts for spec in part.tensors if not spec.name.endswith(SCALE_SUFFIX)}
    missing, unknown = set(expected) - planned, planned - set(expected)
    if missing or unknown:
        sides = (("its files only", missing), ("its Megatron form only", unknown))
        raise PublishError(
            "the tensors of the model differ: "
            + "; ".join(f"in {where} {', '.join(sorted(names)[:5])}" for where, names in sides if names)
        )


def refuse_different_digests(digests: Sequence[str]) -> None:
    """`digests`: of every rank's plan, in order. Raises PublishError."""
    differing = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise PublishError(
            f"rank {', '.join(differing)} would publish other tensors than rank 0: do all machines have the same model "
            "folder and the same versions of megatron-core and megatron-bridge?"
        )


def _refuse_repeated_names(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PublishError(f"{name} would be published twice; the model's names are broken")
        seen.add(name)
    if not names:
        raise PublishError("there is no tensor to publish; the model's names are broken")


def _take_turns(queues: Sequence[Sequence[Bucket]]) -> tuple[Bucket, ...]:
    """While one owner sends, the others prepare; a server takes one bucket at a time."""
    rounds = range(max(map(len, queues)))
    ordered = [queue[number] for number in rounds for queue in queues if number < len(queue)]
    return tuple(replace(bucket, number=number) for number, bucket in enumerate(ordered))


def as_request(bucket: Bucket, group_name: str) -> dict[str, Any]:
    """What a server must know before it receives the bucket (SGLang's /update_weights_from_distributed)."""
    return {
        "names": [tensor.name for tensor in bucket.tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.tensors],
        "shapes": [list(tensor.shape) for tensor in bucket.tensors],
        "group_name": group_name,
        "load_format": "flattened_bucket",
    }

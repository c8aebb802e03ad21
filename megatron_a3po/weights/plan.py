"""The plan of a publication: which rank sends which Hugging Face tensors, from which shards, in which bucket.

Planning is pure: it needs no process group and no model. Every rank reports what it holds, and every rank computes the
same plan from these reports. Each pipeline stage has one owner, its first rank. The owner collects the stage's
parameters from its tensor-parallel and expert-parallel groups and sends the tensors.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from megatron_a3po.errors import PublishError
from megatron_a3po.hf.quantize import SCALE_SUFFIX
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.weights.shards import Holdings, PlannedPart, locate_parameter, refuse_different_replicas

_PIECES = 8
"""A bucket is collected in this many steps, so that a step needs little memory beside the buffer."""
_MIN_PIECE_BYTES = 1 << 20
"""Below this size, a step costs more time than it saves memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSpec:
    """Megatron parameters that become Hugging Face tensors together; see `hf_mapping.Part`."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each whole parameter without padding, by its Megatron name"""
    tensors: tuple[TensorSpec, ...]
    """The tensors as they are published"""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Tensors that travel as one flat buffer: their bytes, one after the other."""

    owner: int
    """The rank that fills and sends the bucket"""
    tensors: tuple[TensorSpec, ...]
    """In the order of their bytes: by falling item size, so that each starts at a multiple of its item size"""
    pieces: tuple[tuple[int, ...], ...]
    """Numbers of the parts that are collected together, step by step"""
    number: int = 0
    """Position in the plan"""

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def title(self) -> str:
        """The bucket's name in messages."""
        more = f" and {len(self.tensors) - 1} more" if len(self.tensors) > 1 else ""
        return f"bucket {self.tensors[0].name}{more}"

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors inside of `buffer` [nbytes] uint8, by name."""
        return dict(self._views(buffer))

    def _views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for tensor in self.tensors:
            yield tensor.name, buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            start += tensor.nbytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All buckets of a publication. Every rank has the same plan."""

    buckets: tuple[Bucket, ...]
    """In the order in which servers receive them"""
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
        """Return the size of the largest bucket of `owner` in bytes; 0 for a rank that owns none."""
        return max((bucket.nbytes for bucket in self.buckets if bucket.owner == owner), default=0)

    def digest(self) -> str:
        """Return a hash that is equal for equal plans."""
        described = [
            [bucket.owner, [(spec.name, str(spec.dtype), spec.shape) for spec in bucket.tensors], bucket.pieces]
            for bucket in self.buckets
        ]
        parameters = [[parameter.describe() for parameter in part.parameters] for part in self.parts]
        return hashlib.sha256(json.dumps([described, parameters]).encode()).hexdigest()


def make_plan(parts: Sequence[PartSpec], ranks: Sequence[Holdings], *, bucket_bytes: int) -> Plan:
    """Plan the publication of the whole model `parts` from what the `ranks` hold, in the order of the ranks.

    Raises PublishError, which names rank and parameter, if no rank or only some ranks hold a parameter, if shards do
    not make up the whole, if a rank holds a parameter that the model does not have, and if a name comes twice.
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
            parameters=tuple(locate_parameter(name, shape, ranks) for name, shape in part.shapes.items()),
            tensors=part.tensors,
        )
        for number, part in enumerate(parts)
    ]
    by_owner: dict[int, list[PlannedPart]] = {}
    for part in planned:
        owners = {parameter.owner for parameter in part.parameters}
        if len(owners) > 1:
            raise PublishError(f"{part.tensors[0].name} is made of parameters of the ranks {sorted(owners)}")
        by_owner.setdefault(owners.pop(), []).append(part)
    queues = [_split_into_buckets(owner, by_owner[owner], bucket_bytes) for owner in sorted(by_owner)]
    return Plan(buckets=_take_turns(queues), parts=tuple(planned))


def refuse_other_names(parts: Sequence[PartSpec], expected: Sequence[str]) -> None:
    """Raise PublishError unless the tensors, in FP8 or not, are those of the model's own weight files."""
    planned = {spec.name for part in parts for spec in part.tensors if not spec.name.endswith(SCALE_SUFFIX)}
    missing, unknown = set(expected) - planned, planned - set(expected)
    if missing or unknown:
        sides = (("its files only", missing), ("its Megatron form only", unknown))
        raise PublishError(
            "the tensors of the model differ: "
            + "; ".join(f"in {where} {', '.join(sorted(names)[:5])}" for where, names in sides if names)
        )


def refuse_different_digests(digests: Sequence[str]) -> None:
    """Raise PublishError unless all ranks have the same plan. `digests`: of every rank's plan, in order."""
    differing = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise PublishError(
            f"rank {', '.join(differing)} would publish other tensors than rank 0; give all machines the same model "
            "folder and the same versions of megatron-core and megatron-bridge"
        )


def as_request(bucket: Bucket, group_name: str) -> dict[str, Any]:
    """Return the body of SGLang's /update_weights_from_distributed that announces the bucket to a server."""
    return {
        "names": [tensor.name for tensor in bucket.tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.tensors],
        "shapes": [list(tensor.shape) for tensor in bucket.tensors],
        "group_name": group_name,
        "load_format": "flattened_bucket",
    }


def _refuse_repeated_names(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PublishError(f"{name} would be published twice; the model's names are broken")
        seen.add(name)
    if not names:
        raise PublishError("there is no tensor to publish; the model's names are broken")


def _split_into_buckets(owner: int, parts: Iterable[PlannedPart], bucket_bytes: int) -> list[Bucket]:
    """Put consecutive parts of together at most `bucket_bytes` into one bucket; a larger part travels alone."""
    buckets = []
    for group in _split_by_size(parts, bucket_bytes):
        tensors = sorted((tensor for part in group for tensor in part.tensors), key=lambda spec: -spec.dtype.itemsize)
        pieces = _split_by_size(group, max(_MIN_PIECE_BYTES, bucket_bytes // _PIECES))
        numbers = tuple(tuple(part.number for part in piece) for piece in pieces)
        buckets.append(Bucket(owner=owner, tensors=tuple(tensors), pieces=numbers))
    return buckets


def _split_by_size(parts: Iterable[PlannedPart], limit: int) -> list[Sequence[PlannedPart]]:
    groups: list[list[PlannedPart]] = []
    size = 0
    for part in parts:
        if not groups or size + part.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.nbytes
    return list(groups)


def _take_turns(queues: Sequence[Sequence[Bucket]]) -> tuple[Bucket, ...]:
    """Order the owners' buckets in turns: a server takes one bucket at a time, and the other owners prepare theirs."""
    rounds = range(max(map(len, queues)))
    ordered = [queue[number] for number in rounds for queue in queues if number < len(queue)]
    return tuple(replace(bucket, number=number) for number, bucket in enumerate(ordered))

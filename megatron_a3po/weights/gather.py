"""Collect sharded Megatron parameters as whole Hugging Face tensors: buckets to publish, or tensors to export."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
from megatron.bridge.models.conversion.utils import persistent_buffers
from megatron.core import parallel_state
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_a3po.errors import A3poError, PublishError
from megatron_a3po.hf.fp8_blocks import FP8
from megatron_a3po.hf.quantize import SCALE_SUFFIX, quantize_blockwise
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.parallel.agreement import on_all_ranks
from megatron_a3po.parallel.messages import gather_json
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.hf_mapping import Part, build_hf_mapping
from megatron_a3po.weights.plan import Bucket, PartSpec, Plan, make_plan, refuse_different_digests, refuse_other_names
from megatron_a3po.weights.served_precision import in_served_precision
from megatron_a3po.weights.shards import Holdings, ParameterShard, ShardedParameter

_EMBEDDING, _OUTPUT_LAYER = "model.embed_tokens.weight", "lm_head.weight"


class WeightCollector:
    """Collects the policy's weights. Every rank has one.

    It plans once. For a publication, every rank calls `fill` for every bucket of `plan`, in the plan's order. The plan
    follows the precision of the servers; an export by `tensors` has the trainer's precision.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        groups: ProcessGroupCollection,
        model: Path,
        gloo_group: dist.ProcessGroup,
        *,
        bucket_bytes: int,
        expected_names: Sequence[str] | None = None,
        is_fp8: Callable[[TensorSpec], bool] = lambda _: False,
        timer: PhaseTimer | None = None,
    ) -> None:
        """Plan what is collected. Collective over all ranks.

        chunks: this rank's part of the policy. groups: Megatron's. model: the folder of config.json. gloo_group: a gloo
        group of all ranks. expected_names: the tensors of the model's own files, if it has any; a tied model whose
        files have an output layer is published with one. is_fp8: tells which tensors are published in FP8 with
        block-wise scales. The last two must be equal on all ranks.

        Raises PublishError on every rank unless the ranks together hold the model that config.json describes.
        """
        self.rank = dist.get_rank()
        self._groups = {False: groups.tp, True: groups.ep}
        self._timer = timer or PhaseTimer()
        solo = dist.new_group([self.rank], backend="gloo", use_local_synchronization=True)
        assert isinstance(solo, dist.ProcessGroup)
        self._solo = solo
        with _as_one_rank(solo):
            self._mapping = on_all_ranks(lambda: build_hf_mapping(model), gloo_group, PublishError)
        known = {parameter.name for part in self._mapping.parts for parameter in part.parameters}
        self._held = _local_tensors(chunks, known)
        mine = _describe(self._held, groups)
        self.device = next(iter(self._held.values())).device
        everywhere = [Holdings.from_json(held) for held in gather_json(mine.to_json(), gloo_group)]
        dtypes = {name: shard.dtype for held in everywhere for name, shard in held.shards.items()}
        names = {name for part in self._mapping.parts for name in part.hf_names}
        self._copies_embedding = _OUTPUT_LAYER in (expected_names or ()) and _OUTPUT_LAYER not in names
        with _as_one_rank(solo):
            specs = [self._specify(part, dtypes) for part in self._mapping.parts]
        if expected_names is not None:
            refuse_other_names(specs, expected_names)
        served = [in_served_precision(spec, is_fp8) for spec in specs]
        self.plan: Plan = make_plan(served, everywhere, bucket_bytes=bucket_bytes)
        self._export_plan = make_plan(specs, everywhere, bucket_bytes=bucket_bytes) if served != specs else self.plan
        refuse_different_digests(gather_json(self.plan.digest(), gloo_group))
        self._dtypes = {name: shard.dtype for name, shard in mine.shards.items()}
        if self.device.type == "cuda" and any(spec.dtype == FP8 for spec in self.plan.tensors):
            from megatron_a3po.hf.triton_quantize import check_kernel

            on_all_ranks(lambda: check_kernel(self.device), gloo_group, PublishError)

    def _specify(self, part: Part, dtypes: Mapping[str, torch.dtype]) -> PartSpec:
        hollow = {
            parameter.name: torch.empty(
                parameter.shape, dtype=dtypes.get(parameter.name, parameter.dtype), device="meta"
            )
            for parameter in part.parameters
        }
        converted = self._to_hf(part, hollow)
        return PartSpec(
            shapes={parameter.name: parameter.shape for parameter in part.parameters},
            tensors=tuple(
                TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
                for name, tensor in converted.items()
            ),
        )

    @torch.no_grad()
    def fill(self, bucket: Bucket, buffer: Tensor | None) -> None:
        """Collect a bucket. The owner has its bytes written into `buffer` [bucket.nbytes] uint8; others pass None.

        Collective over the ranks that hold shards of the bucket; on other ranks it does nothing. An owner that passes
        None takes part without a result, so that the ranks stay together after an error. Raises A3poError for weights
        that cannot be converted, such as NaN to FP8, after all shards of the bucket have been received.
        """
        views = bucket.views(buffer) if buffer is not None else None
        failure: Exception | None = None
        for piece in bucket.pieces:
            with self._timer.phase("publish/gather"):
                parameters = [parameter for number in piece for parameter in self.plan.parts[number].parameters]
                shards = self._exchange(bucket.owner, parameters)
            if views is not None and failure is None:
                with self._timer.phase("publish/convert"), _as_one_rank(self._solo):
                    try:
                        self._convert(piece, shards, views)
                    except Exception as error:
                        # The other ranks send the rest of the bucket in any case, and this one has to receive it.
                        failure = error
        if failure is not None:
            raise failure if isinstance(failure, A3poError) else PublishError(f"{bucket.title}: {failure}") from failure

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its Hugging Face name on rank 0, in memory of its own; nothing on other ranks.

        The tensors have the trainer's precision, bf16 or fp32, whatever the servers hold. Collective: every rank must
        exhaust the iterator. One bucket at a time is in memory, besides what the caller keeps.
        """
        for bucket in self._export_plan.buckets:
            is_here = self.rank in (0, bucket.owner)
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device) if is_here else None
            self.fill(bucket, buffer if self.rank == bucket.owner else None)
            if buffer is not None and bucket.owner != 0:
                if self.rank == 0:
                    dist.recv(buffer, bucket.owner)
                else:
                    dist.send(buffer, 0)
            if buffer is not None and self.rank == 0:
                yield from bucket.views(buffer).items()

    def _to_hf(self, part: Part, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converted = self._mapping.to_hf(part, whole)
        if self._copies_embedding and _EMBEDDING in converted:
            converted[_OUTPUT_LAYER] = converted[_EMBEDDING]
        return converted

    def _exchange(self, owner: int, parameters: Sequence[ShardedParameter]) -> dict[tuple[str, int], Tensor]:
        """Return the shards by parameter and rank on the owner, to which every rank sends its own in one message."""
        found = {
            (parameter.name, self.rank): self._read(parameter.name)
            for parameter in parameters
            if self.rank in parameter.ranks
        }
        for is_expert, group in self._groups.items():
            by_rank: dict[int, list[ShardedParameter]] = {}
            # By falling item size, so that each shard starts at a multiple of its item size.
            for parameter in sorted(parameters, key=lambda parameter: -parameter.shard.dtype.itemsize):
                for rank in parameter.ranks if parameter.is_expert == is_expert else ():
                    if rank != owner:
                        by_rank.setdefault(rank, []).append(parameter)
            if self.rank == owner:
                found |= self._receive(by_rank, group)
            elif self.rank in by_rank:
                own = [found[parameter.name, self.rank] for parameter in by_rank[self.rank]]
                message = torch.cat([shard.contiguous().view(-1).view(torch.uint8) for shard in own])
                _wait([dist.P2POp(dist.isend, message, owner, group)])
        return found

    def _receive(
        self, by_rank: Mapping[int, list[ShardedParameter]], group: dist.ProcessGroup
    ) -> dict[tuple[str, int], Tensor]:
        messages = {
            rank: torch.empty(sum(parameter.shard_bytes for parameter in sent), dtype=torch.uint8, device=self.device)
            for rank, sent in by_rank.items()
        }
        _wait([dist.P2POp(dist.irecv, message, rank, group) for rank, message in messages.items()])
        found: dict[tuple[str, int], Tensor] = {}
        for rank, message in messages.items():
            start = 0
            for parameter in by_rank[rank]:
                content = message[start : start + parameter.shard_bytes]
                found[parameter.name, rank] = content.view(parameter.shard.dtype).view(parameter.shard.shape)
                start += parameter.shard_bytes
        return found

    def _read(self, name: str) -> Tensor:
        tensor = self._held[name]
        values = dequantize_fp8_tensor(tensor) if is_float8tensor(tensor) else tensor.detach()
        return values.to(self._dtypes[name])

    def _convert(
        self, piece: Sequence[int], shards: Mapping[tuple[str, int], Tensor], views: Mapping[str, Tensor]
    ) -> None:
        for number in piece:
            part = self.plan.parts[number]
            whole = {
                parameter.name: parameter.merge([shards[parameter.name, rank] for rank in parameter.ranks])
                for parameter in part.parameters
            }
            converted = self._to_hf(self._mapping.parts[number], whole)
            for name, tensor in converted.items():
                if name + SCALE_SUFFIX in views:
                    values, scales = quantize_blockwise(tensor, name)
                    _store(name, values, views)
                    _store(name + SCALE_SUFFIX, scales, views)
                else:
                    _store(name, tensor, views)


def _store(name: str, tensor: Tensor, views: Mapping[str, Tensor]) -> None:
    if tensor.shape != views[name].shape or tensor.dtype != views[name].dtype:
        raise PublishError(f"{name} became {list(tensor.shape)} {tensor.dtype}, and was planned as {views[name].shape}")
    views[name].copy_(tensor)


def _wait(operations: list[Any]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _local_tensors(chunks: Sequence[torch.nn.Module], known: set[str]) -> dict[str, Tensor]:
    """Return parameters and buffers of this rank by their names in the whole model.

    Leaves out the second output layer, on the last stage of a tied model, and buffers that belong to no Hugging Face
    tensor.
    """
    config = get_model_config(chunks[0])
    found: dict[str, Tensor] = {}
    for number, chunk in enumerate(chunks):
        named = itertools.chain(chunk.named_parameters(), persistent_buffers(chunk))
        for wrapped_name, tensor in named:
            if "_extra_state" in wrapped_name:
                continue
            local_name = wrapped_name
            while local_name.startswith("module."):
                local_name = local_name.removeprefix("module.")
            name = _megatron_local_name_to_global(list(chunks), config, local_name, number)
            is_parameter = isinstance(tensor, torch.nn.Parameter) and name != "output_layer.weight"
            if name in known or is_parameter:
                found[name] = tensor
    return found


def _describe(held: Mapping[str, Tensor], groups: ProcessGroupCollection) -> Holdings:
    shards = {
        name: ParameterShard(
            shape=tuple(tensor.shape),
            # The routers' biases, which are buffers, are in the model's precision at first. Megatron turns them into
            # float32 while it runs.
            dtype=tensor.dtype if isinstance(tensor, torch.nn.Parameter) else torch.float32,
            stride=getattr(tensor, "partition_stride", 1),
        )
        for name, tensor in held.items()
    }
    return Holdings(
        rank=dist.get_rank(),
        stage=groups.pp.rank(),
        tensor_group=tuple(dist.get_process_group_ranks(groups.tp)),
        expert_group=tuple(dist.get_process_group_ranks(groups.ep)),
        shards=shards,
    )


@contextmanager
def _as_one_rank(solo: dist.ProcessGroup) -> Iterator[None]:
    """Make Megatron's parallel state that of a single rank, so that megatron-bridge converts whole parameters."""
    state = vars(parallel_state)
    saved = {name: value for name, value in state.items() if name[0] == "_" and name[1] != "_" and name.isupper()}
    try:
        for name, value in saved.items():
            if isinstance(value, dist.ProcessGroup) or name in ("_EMBEDDING_GROUP", "_POSITION_EMBEDDING_GROUP"):
                state[name] = solo
            elif name.endswith("_RANKS") and value is not None:
                state[name] = [dist.get_rank()]
            elif name.startswith(("_MPU_", "_VIRTUAL_")):
                state[name] = None
        yield
    finally:
        state.update(saved)

"""Who sends what, by what the ranks say they hold: plans of made-up layouts, checked against one whole tensor."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_a3po.errors import PublishError
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.weights.build import published_names
from megatron_a3po.weights.plan import (
    PartSpec,
    Plan,
    make_plan,
    refuse_different_digests,
    refuse_other_names,
)
from megatron_a3po.weights.shards import Holdings, ParameterShard, ShardedParameter
from tests.support.publishing import OneRank

VOCABULARY, HIDDEN = 10, 4
EMBEDDING, NORM = "embedding.word_embeddings.weight", "decoder.layers.1.norm.weight"
PROJ, FC1 = "decoder.layers.0.linear_proj.weight", "decoder.layers.0.linear_fc1.weight"
EXPERT = "decoder.layers.0.experts.linear_fc2.weight"
SHAPES = {
    EMBEDDING: (VOCABULARY, HIDDEN),
    PROJ: (HIDDEN, 8),
    FC1: (12, HIDDEN),
    f"{EXPERT}0": (HIDDEN, 6),
    f"{EXPERT}1": (HIDDEN, 6),
    "decoder.layers.0.norm.weight": (HIDDEN,),
    NORM: (HIDDEN,),
}


def two_stages() -> list[Holdings]:
    """TP 2 x PP 2 with EP 2: ranks 0 and 1 hold the first stage, 2 and 3 the second."""
    stages = []
    for rank in range(4):
        shards = {
            EMBEDDING: shard(6, HIDDEN),  # 12 rows with padding
            PROJ: shard(HIDDEN, 4),
            FC1: replace(shard(6, HIDDEN), stride=2),
            f"{EXPERT}{rank}": shard(HIDDEN, 6),
            "decoder.layers.0.norm.weight": shard(HIDDEN),
        }
        if rank >= 2:
            shards = {NORM: shard(HIDDEN)}
        group = (0, 1) if rank < 2 else (2, 3)
        held = Holdings(rank=rank, stage=rank // 2, tensor_group=group, expert_group=group, shards=shards)
        stages.append(Holdings.from_json(held.to_json()))
    return stages


def shard(*shape: int) -> ParameterShard:
    return ParameterShard(shape=shape, dtype=torch.bfloat16)


def parts(shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[PartSpec]:
    return [
        PartSpec(shapes={name: shape}, tensors=(TensorSpec(name=f"hf.{name}", dtype=torch.bfloat16, shape=shape),))
        for name, shape in shapes.items()
    ]


def without(ranks: list[Holdings], rank: int, name: str) -> list[Holdings]:
    kept = {key: value for key, value in ranks[rank].shards.items() if key != name}
    return [replace(held, shards=kept) if held.rank == rank else held for held in ranks]


def holding(ranks: list[Holdings], rank: int, name: str, other: ParameterShard) -> list[Holdings]:
    return [replace(held, shards={**held.shards, name: other}) if held.rank == rank else held for held in ranks]


def parameter_of(plan: Plan, name: str) -> ShardedParameter:
    return next(parameter for part in plan.parts for parameter in part.parameters if parameter.name == name)


def test_every_tensor_is_sent_once_by_the_first_rank_of_its_stage() -> None:
    plan = make_plan(parts(), two_stages(), bucket_bytes=1000)

    assert sorted(tensor.name for tensor in plan.tensors) == sorted(f"hf.{name}" for name in SHAPES)
    assert plan.owners == (0, 2)
    last = next(bucket for bucket in plan.buckets if bucket.owner == 2)
    assert [tensor.name for tensor in last.tensors] == ["hf.decoder.layers.1.norm.weight"]
    sizes = [2 * torch.Size(shape).numel() for shape in SHAPES.values()]
    assert plan.nbytes == sum(sizes)


def cut(whole: Tensor, axis: int, stride: int, num_ranks: int) -> list[Tensor]:
    """As Megatron shards: each of `stride` equal parts is divided over the ranks."""
    rows = [part.chunk(num_ranks, axis) for part in whole.chunk(stride, axis)]
    return [torch.cat([row[rank] for row in rows], axis) for rank in range(num_ranks)]


@pytest.mark.parametrize(("name", "axis", "stride"), [(EMBEDDING, 0, 1), (PROJ, 1, 1), (FC1, 0, 2)])
def test_shards_are_put_together_as_they_were_cut_and_padding_goes(name: str, axis: int, stride: int) -> None:
    parameter = parameter_of(make_plan(parts(), two_stages(), bucket_bytes=1000), name)
    whole = torch.randn(SHAPES[name])
    padded = torch.cat([whole, torch.full((2, HIDDEN), torch.nan)]) if "embedding" in name else whole
    assert parameter.ranks == (0, 1)
    assert torch.equal(parameter.merge(cut(padded, axis, stride, 2)), whole)


def test_an_expert_comes_from_the_rank_that_holds_it_and_what_every_rank_holds_is_not_collected() -> None:
    plan = make_plan(parts(), two_stages(), bucket_bytes=1000)
    for name, ranks in {f"{EXPERT}0": (0,), f"{EXPERT}1": (1,), "decoder.layers.0.norm.weight": (0,)}.items():
        assert parameter_of(plan, name).ranks == ranks


def test_the_plan_does_not_depend_on_the_rank_that_makes_it_and_its_digest_tells_plans_apart() -> None:
    digests = [make_plan(parts(), two_stages(), bucket_bytes=size).digest() for size in (1000, 1000, 50)]

    assert digests[0] == digests[1] != digests[2]
    refuse_different_digests(digests[:2])
    with pytest.raises(PublishError, match="rank 2"):
        refuse_different_digests(digests)


def both_holding(name: str, *shape: int) -> list[Holdings]:
    return holding(holding(two_stages(), 0, name, shard(*shape)), 1, name, shard(*shape))


SINGLE = Holdings(rank=0, stage=0, tensor_group=(0,), expert_group=(0,), shards={"norm": shard(HIDDEN)})
REPLICA = replace(SINGLE, rank=1, tensor_group=(1,), expert_group=(1,), shards={"norm": shard(3)})
IN_FLOAT32 = ParameterShard(shape=(HIDDEN, 4), dtype=torch.float32)
TWICE = [replace(part, tensors=(TensorSpec(name="w", dtype=torch.float32, shape=(1,)),)) for part in parts()]
NO_PLAN: dict[str, tuple[list[PartSpec], list[Holdings], str]] = {
    "rank 0 lacks a shard": (parts(), without(two_stages(), 0, FC1), f"rank 0 .*{FC1}"),
    "rank 1 lacks a shard": (parts(), without(two_stages(), 1, FC1), f"rank 1 .*{FC1}"),
    "no rank has the expert": (parts(), without(two_stages(), 1, f"{EXPERT}1"), f"no rank.*{EXPERT}1"),
    "no rank has the norm": (parts(), without(without(two_stages(), 2, NORM), 3, NORM), f"no rank.*{NORM}"),
    "a rank has more": (parts(), holding(two_stages(), 3, "layers.9", shard(HIDDEN)), r"rank 3.*layers\.9"),
    "shards are too small": (parts(), both_holding(PROJ, HIDDEN, 3), rf"(?s){PROJ}.*rank 0.*rank 1"),
    "shards along another axis": (parts(), both_holding(PROJ, 2, 4), rf"(?s){PROJ}.*rank 0.*rank 1"),
    "shards lack an axis": (parts(), both_holding(PROJ, HIDDEN), rf"(?s){PROJ}.*rank 0.*rank 1"),
    "shards lack rows": (parts(), both_holding(EMBEDDING, 4, HIDDEN), rf"(?s){EMBEDDING}.*rank 0.*rank 1"),
    "shards of other dtypes": (parts(), holding(two_stages(), 1, PROJ, IN_FLOAT32), f"rank 1.*{PROJ}"),
    "a replica holds others": (parts({"norm": (HIDDEN,)}), [SINGLE, REPLICA], "rank 1 .*norm"),
    "a name comes twice": (TWICE, two_stages(), "w would"),
    "no tensors": ([], [], "no tensor"),
}


@pytest.mark.parametrize("case", NO_PLAN)
def test_what_does_not_fit_together_is_an_error_that_names_parameter_and_rank(case: str) -> None:
    specs, ranks, words = NO_PLAN[case]
    with pytest.raises(PublishError, match=words):
        make_plan(specs, ranks, bucket_bytes=1000)


def one_rank(tensors: Sequence[tuple[str, int, torch.dtype]], bucket_bytes: int) -> Plan:
    named = [(name, torch.empty(size, dtype=dtype, device="meta")) for name, size, dtype in tensors]
    return OneRank(lambda: named, bucket_bytes).plan


@pytest.mark.parametrize("bucket_bytes", [1, 7, 8, 16, 10_000])
def test_buckets_hold_every_tensor_once_within_their_bound_and_aligned(bucket_bytes: int) -> None:
    tensors = [(f"t{n}", n, (torch.float32, torch.bfloat16, torch.uint8)[n % 3]) for n in range(1, 13)]

    plan = one_rank(tensors, bucket_bytes)

    assert sorted(tensor.name for tensor in plan.tensors) == sorted(name for name, _, _ in tensors)
    for bucket in plan.buckets:
        assert len(bucket.tensors) == 1 or bucket.nbytes <= bucket_bytes
        offset = 0
        for tensor in bucket.tensors:
            assert offset % tensor.dtype.itemsize == 0
            offset += tensor.nbytes
        views = bucket.views(torch.zeros(bucket.nbytes, dtype=torch.uint8))
        assert [(name, view.dtype) for name, view in views.items()] == [(t.name, t.dtype) for t in bucket.tensors]
        pieces = [number for piece in bucket.pieces for number in piece]
        assert sorted(plan.parts[number].tensors[0].name for number in pieces) == sorted(t.name for t in bucket.tensors)
    assert [bucket.number for bucket in plan.buckets] == list(range(len(plan.buckets)))


def test_a_bucket_is_collected_in_eight_steps_unless_it_is_so_small_that_they_would_cost_more() -> None:
    def numbers_of_steps(tensor_bytes: int) -> list[int]:
        tensors = [(f"t{n}", tensor_bytes, torch.uint8) for n in range(128)]
        return [len(bucket.pieces) for bucket in one_rank(tensors, 64 * tensor_bytes).buckets]

    assert numbers_of_steps(1 << 20) == [8, 8]
    assert numbers_of_steps(1 << 15) == [2, 2]  # of 1 MiB
    assert numbers_of_steps(1 << 10) == [1, 1]


def test_owners_take_turns_so_that_the_others_can_prepare() -> None:
    names = {f"decoder.layers.{number}.norm.weight": (HIDDEN,) for number in range(6)}
    stages = [{name: shard(HIDDEN) for name in list(names)[3 * rank : 3 * rank + 3]} for rank in range(2)]
    ranks = [
        Holdings(rank=rank, stage=rank, tensor_group=(rank,), expert_group=(rank,), shards=shards)
        for rank, shards in enumerate(stages)
    ]
    plan = make_plan(parts(names), ranks, bucket_bytes=2 * HIDDEN)
    assert [bucket.owner for bucket in plan.buckets] == [0, 1, 0, 1, 0, 1]


def test_tensors_that_only_the_files_or_only_the_model_have_are_named() -> None:
    expected = [f"hf.{name}" for name in SHAPES]
    refuse_other_names(parts(), expected)
    with pytest.raises(PublishError, match=r"files.*lm_head\.weight"):
        refuse_other_names(parts(), [*expected, "lm_head.weight"])
    with pytest.raises(PublishError, match=f"Megatron.*{expected[0]}"):
        refuse_other_names(parts(), expected[1:])


def test_the_names_of_a_models_files_are_those_of_its_policy() -> None:
    files = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        "model.layers.0.mlp.experts.gate_up_proj_scales",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.eh_proj.weight",
        "mtp.fc.weight",
    ]
    names = published_names(files, {"num_hidden_layers": 1})
    assert names == ["model.embed_tokens.weight", "model.layers.0.mlp.experts.gate_up_proj"]

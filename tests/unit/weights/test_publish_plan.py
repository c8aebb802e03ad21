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
    as_request,
    make_plan,
    refuse_different_digests,
    refuse_other_names,
)
from megatron_a3po.weights.shards import Holdings, ParameterShard, ShardedParameter

VOCABULARY, HIDDEN = 10, 4
SHAPES = {
    "embedding.word_embeddings.weight": (VOCABULARY, HIDDEN),
    "decoder.layers.0.linear_proj.weight": (HIDDEN, 8),
    "decoder.layers.0.linear_fc1.weight": (12, HIDDEN),
    "decoder.layers.0.experts.linear_fc2.weight0": (HIDDEN, 6),
    "decoder.layers.0.experts.linear_fc2.weight1": (HIDDEN, 6),
    "decoder.layers.0.norm.weight": (HIDDEN,),
    "decoder.layers.1.norm.weight": (HIDDEN,),
}


def two_stages() -> list[Holdings]:
    """TP 2 x PP 2 with EP 2: ranks 0 and 1 hold the first stage, 2 and 3 the second."""
    stages = []
    for rank in range(4):
        first = 2 * (rank // 2)
        shards: dict[str, ParameterShard] = {}
        if rank < 2:
            shards = {
                "embedding.word_embeddings.weight": shard(6, HIDDEN),  # 12 rows with padding
                "decoder.layers.0.linear_proj.weight": shard(HIDDEN, 4),
                "decoder.layers.0.linear_fc1.weight": replace(shard(6, HIDDEN), stride=2),
                f"decoder.layers.0.experts.linear_fc2.weight{rank}": shard(HIDDEN, 6),
                "decoder.layers.0.norm.weight": shard(HIDDEN),
            }
        else:
            shards = {"decoder.layers.1.norm.weight": shard(HIDDEN)}
        group = (first, first + 1)
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


@pytest.mark.parametrize(
    ("name", "axis", "stride"),
    [
        ("embedding.word_embeddings.weight", 0, 1),
        ("decoder.layers.0.linear_proj.weight", 1, 1),
        ("decoder.layers.0.linear_fc1.weight", 0, 2),
    ],
)
def test_shards_are_put_together_as_they_were_cut_and_padding_goes(name: str, axis: int, stride: int) -> None:
    parameter = parameter_of(make_plan(parts(), two_stages(), bucket_bytes=1000), name)
    whole = torch.randn(SHAPES[name])
    padded = torch.cat([whole, torch.full((2, HIDDEN), torch.nan)]) if "embedding" in name else whole

    merged = parameter.merge(cut(padded, axis, stride, 2))

    assert parameter.ranks == (0, 1)
    assert torch.equal(merged, whole)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("decoder.layers.0.experts.linear_fc2.weight0", (0,)),
        ("decoder.layers.0.experts.linear_fc2.weight1", (1,)),
        ("decoder.layers.0.norm.weight", (0,)),
    ],
)
def test_an_expert_comes_from_the_rank_that_holds_it_and_what_every_rank_holds_is_not_collected(
    name: str, ranks: tuple[int, ...]
) -> None:
    assert parameter_of(make_plan(parts(), two_stages(), bucket_bytes=1000), name).ranks == ranks


def test_the_plan_does_not_depend_on_the_rank_that_makes_it_and_its_digest_tells_plans_apart() -> None:
    digests = [make_plan(parts(), two_stages(), bucket_bytes=size).digest() for size in (1000, 1000, 50)]

    assert digests[0] == digests[1] != digests[2]
    refuse_different_digests(digests[:2])
    with pytest.raises(PublishError, match="rank 2"):
        refuse_different_digests(digests)


@pytest.mark.parametrize(
    ("rank", "name"),
    [
        (1, "decoder.layers.0.linear_fc1.weight"),
        (0, "decoder.layers.0.linear_fc1.weight"),
        (1, "decoder.layers.0.experts.linear_fc2.weight1"),
        (2, "decoder.layers.1.norm.weight"),
    ],
)
def test_a_parameter_that_a_rank_lacks_is_an_error_that_names_it_and_the_rank(rank: int, name: str) -> None:
    ranks = without(two_stages(), rank, name)
    pattern = f"rank {rank} .*{name}"
    if "linear_fc1" not in name:
        ranks = without(ranks, 3, name)
        pattern = f"no rank holds.*{name}"
    with pytest.raises(PublishError, match=pattern):
        make_plan(parts(), ranks, bucket_bytes=1000)


def test_a_parameter_that_the_model_does_not_have_is_an_error_that_names_the_rank() -> None:
    ranks = holding(two_stages(), 3, "decoder.layers.9.norm.weight", shard(HIDDEN))

    with pytest.raises(PublishError, match=r"rank 3.*decoder\.layers\.9\.norm\.weight"):
        make_plan(parts(), ranks, bucket_bytes=1000)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("decoder.layers.0.linear_proj.weight", shard(HIDDEN, 3)),
        ("decoder.layers.0.linear_proj.weight", shard(2, 4)),
        ("decoder.layers.0.linear_proj.weight", shard(HIDDEN)),
        ("embedding.word_embeddings.weight", shard(4, HIDDEN)),
    ],
)
def test_shards_that_do_not_make_up_the_whole_are_an_error_before_anything_is_sent(
    name: str, wrong: ParameterShard
) -> None:
    ranks = holding(holding(two_stages(), 0, name, wrong), 1, name, wrong)

    with pytest.raises(PublishError, match=rf"(?s){name}.*rank 0.*rank 1"):
        make_plan(parts(), ranks, bucket_bytes=1000)


def test_shards_of_different_dtypes_are_an_error() -> None:
    name = "decoder.layers.0.linear_proj.weight"
    ranks = holding(two_stages(), 1, name, ParameterShard(shape=(HIDDEN, 4), dtype=torch.float32))

    with pytest.raises(PublishError, match=f"rank 1.*{name}"):
        make_plan(parts(), ranks, bucket_bytes=1000)


def test_a_data_parallel_replica_with_another_parameter_list_is_named() -> None:
    single = Holdings(rank=0, stage=0, tensor_group=(0,), expert_group=(0,), shards={"norm": shard(HIDDEN)})
    replica = replace(single, rank=1, tensor_group=(1,), expert_group=(1,), shards={"norm": shard(3)})

    with pytest.raises(PublishError, match=r"rank 1 .*norm"):
        make_plan(parts({"norm": (HIDDEN,)}), [single, replica], bucket_bytes=1000)


def test_a_name_that_comes_twice_and_a_model_without_tensors_are_errors() -> None:
    twice = [replace(part, tensors=(TensorSpec(name="w", dtype=torch.float32, shape=(1,)),)) for part in parts()]

    with pytest.raises(PublishError, match="w would"):
        make_plan(twice, two_stages(), bucket_bytes=1000)
    with pytest.raises(PublishError, match="no tensor"):
        make_plan([], [], bucket_bytes=1000)


def one_rank(tensors: Sequence[tuple[str, int, torch.dtype]], bucket_bytes: int) -> Plan:
    shards = {name: ParameterShard(shape=(size,), dtype=dtype) for name, size, dtype in tensors}
    held = Holdings(rank=0, stage=0, tensor_group=(0,), expert_group=(0,), shards=shards)
    specs = [
        PartSpec(shapes={name: (size,)}, tensors=(TensorSpec(name=name, dtype=dtype, shape=(size,)),))
        for name, size, dtype in tensors
    ]
    return make_plan(specs, [held], bucket_bytes=bucket_bytes)


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
    ranks = [
        Holdings(
            rank=rank,
            stage=rank,
            tensor_group=(rank,),
            expert_group=(rank,),
            shards={name: shard(HIDDEN) for number, name in enumerate(names) if number // 3 == rank},
        )
        for rank in range(2)
    ]

    plan = make_plan(parts(names), ranks, bucket_bytes=2 * HIDDEN)

    assert [bucket.owner for bucket in plan.buckets] == [0, 1, 0, 1, 0, 1]


def test_a_request_lists_names_dtypes_and_shapes_in_the_order_of_the_bytes() -> None:
    plan = one_rank([("a", 3, torch.bfloat16), ("b", 2, torch.float32)], 1000)

    assert as_request(plan.buckets[0], "group") == {
        "names": ["b", "a"],
        "dtypes": ["float32", "bfloat16"],
        "shapes": [[2], [3]],
        "group_name": "group",
        "load_format": "flattened_bucket",
    }


def test_tensors_that_only_the_files_or_only_the_model_have_are_named() -> None:
    expected = [f"hf.{name}" for name in SHAPES]

    refuse_other_names(parts(), expected)
    with pytest.raises(PublishError, match=r"its files only lm_head\.weight"):
        refuse_other_names(parts(), [*expected, "lm_head.weight"])
    with pytest.raises(PublishError, match=rf"its Megatron form only {expected[0]}"):
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

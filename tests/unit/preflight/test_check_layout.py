"""A parallel layout or a precision that cannot run is refused before anything starts, with the reason and a remedy."""

from typing import Any

import pytest

from megatron_a3po.config import RunConfig
from megatron_a3po.config.mistakes import Mistake
from megatron_a3po.config.yaml_files import parse_overrides
from megatron_a3po.preflight.architecture import Architecture
from megatron_a3po.preflight.check_layout import architecture_mistakes, token_multiple
from megatron_a3po.preflight.check_run import find_mistakes
from megatron_a3po.preflight.families import read_architecture
from tests.support.mistakes import assert_named

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "max_position_embeddings": 100,
    "vocab_size": 259,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
QWEN_MOE = DENSE | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 12}
GLM = DENSE | EXPERTS | {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 12, "first_k_dense_replace": 1}
DEEPSEEK = GLM | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
GPT_OSS = DENSE | EXPERTS | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 12}


def run(*overrides: str) -> RunConfig:
    values: dict[str, Any] = {
        "model": "nowhere",
        "run_dir": "runs/x",
        "num_steps": 60,
        "device": "cuda",
        "data": {"task": "spell_backward"},
        "rollout": {"servers": ["http://a:1"]},
    }
    assert parse_overrides(values, overrides) == []
    return RunConfig.model_validate(values)


def found(*overrides: str, world_size: int | None = None) -> list[Mistake]:
    """All that is wrong but for the model folder, which is not there."""
    return [mistake for mistake in find_mistakes(run(*overrides), world_size) if mistake.key != "model"]


def against(description: dict[str, Any], *overrides: str) -> list[Mistake]:
    return list(architecture_mistakes(run(*overrides), read_architecture(description)))


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ("parallel.tensor=4 actor.microbatch_tokens=1030", None, "actor.microbatch_tokens = 1030: 4; use 1032"),
        ("parallel.context=3 actor.microbatch_tokens=1025", None, "actor.microbatch_tokens = 1025: 2; use 1026"),
        (
            "parallel.tensor=2 precision=fp8 actor.microbatch_tokens=1200",
            None,
            "actor.microbatch_tokens = 1200: parallel.tensor = 2, fp8.recipe = blockwise; use 1280",
        ),
        (
            "parallel.context=2 actor.microbatch_tokens=512",
            None,
            "actor.microbatch_tokens = 512: rollout.max_new_tokens = 1024; `actor.oversized: alone`",
        ),
        ("parallel.virtual_pipeline=2", None, "parallel.virtual_pipeline = 2; `parallel.pipeline` above 1"),
        (
            "parallel.tensor=2 parallel.context=2",
            6,
            "parallel = 'tensor 2 x pipeline 1 x context 2': 4 ranks or a multiple; --nproc-per-node 4",
        ),
        ("parallel.pipeline=2 parallel.expert=4", 12, "parallel.expert = 4: 6 ranks; use one of [1, 2, 3, 6]"),
        ("rollout.prompts_per_step=1 rollout.group_size=2", 3, "rollout.prompts_per_step = 1: 3 data-parallel ranks"),
        (
            "rollout.prompts_per_step=4 rollout.group_size=2 actor.minibatches=4",
            4,
            "rollout.prompts_per_step = 4: 2 trajectories per minibatch",
        ),
        (
            "rollout.prompts_per_step=32 actor.minibatches=5",
            None,
            "actor.minibatches = 5: rollout.prompts_per_step = 32; use a divisor of 32, or 35",
        ),
        ("parallel.last_stage_layers=1", None, "parallel.last_stage_layers = 1; `parallel.pipeline`"),
        (
            "parallel.pipeline=2 parallel.virtual_pipeline=2 parallel.last_stage_layers=1",
            None,
            "parallel.last_stage_layers = 1; `parallel.virtual_pipeline`",
        ),
        ("fp8.recipe=mxfp8", None, "fp8.recipe = 'mxfp8': precision = bf16"),
        ("precision=fp32 fp8.parameters=true", None, "fp8.parameters = True: precision = fp32"),
        ("fp8.bf16_layers_at_start=1", None, "fp8.bf16_layers_at_start = 1; `precision: fp8`"),
        (
            "precision=fp8 fp8.parameters=true parallel.tensor=2",
            None,
            "fp8.parameters = True: fp8.recipe = blockwise; `parallel.tensor: 1`",
        ),
        (
            "precision=fp8 fp8.parameters=true fp8.recipe=tensorwise algorithm.kl_coefficient=0.1",
            None,
            "fp8.parameters = True: algorithm.kl_coefficient = 0.1; `algorithm.kl_coefficient: 0`",
        ),
        (
            "precision=fp8 fp8.parameters=true fp8.recipe=tensorwise optimizer.offload=true",
            None,
            "fp8.parameters = True: optimizer.offload = True; `optimizer.offload: false`",
        ),
        (
            "precision=fp8 fp8.parameters=true fp8.recipe=delayed",
            None,
            "fp8.parameters = True: fp8.recipe = delayed; another recipe",
        ),
        (
            "precision=fp8 fp8.recipe=delayed fp8.bf16_layers_at_end=1",
            None,
            "fp8.bf16_layers_at_end = 1: fp8.recipe = delayed; use 0",
        ),
        ("device=cpu precision=fp8", None, "precision = 'fp8': `device: cpu`; `precision: bf16`"),
        ("precision=fp32 parallel.context=2", None, "parallel.context = 2: float32; `precision: bf16`"),
        (
            "checkpoint.every_steps=5 checkpoint.keep_every=7",
            None,
            "checkpoint.keep_every = 7: checkpoint.every_steps = 5; multiple of 5",
        ),
        (
            "checkpoint.every_steps=0 checkpoint.keep_every=7",
            None,
            "checkpoint.keep_every = 7; set `checkpoint.every_steps`",
        ),
        ("device=cpu optimizer.offload=true", None, "optimizer.offload = True: `device: cpu`; remove this key"),
        ("precision=fp32 optimizer.offload=true", None, "optimizer.offload = True: float32; `precision: bf16`"),
        (
            "proximal=reuse_target actor.minibatches=2",
            None,
            "proximal = 'reuse_target': 2 optimizer steps; `actor.minibatches: 1`",
        ),
        (
            "optimizer.warmup_steps=121 actor.minibatches=2",
            None,
            "optimizer.warmup_steps = 121: 120 optimizer steps; use at most 120",
        ),
        (
            "optimizer.min_learning_rate=1e-5 optimizer.schedule=cosine",
            None,
            "optimizer.min_learning_rate = 1e-05: optimizer.learning_rate = 1e-06; use at most 1e-06",
        ),
        (
            "optimizer.min_learning_rate=1e-7",
            None,
            "optimizer.min_learning_rate = 1e-07: optimizer.schedule = constant; linear or cosine",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(overrides: str, world_size: int | None, expected: str) -> None:
    assert_named(found(*overrides.split(), world_size=world_size), expected)


@pytest.mark.parametrize(
    ("overrides", "multiple"),
    [
        ([], 1),
        (["parallel.tensor=4"], 4),
        (["parallel.tensor=3", "parallel.context=2"], 6),
        (["parallel.context=8"], 2),
        (["precision=fp8", "fp8.recipe=delayed"], 16),
        (["precision=fp8", "fp8.recipe=mxfp8", "parallel.tensor=4", "parallel.context=2"], 128),
        (["precision=fp8", "parallel.tensor=2"], 256),
    ],
)
def test_microbatches_are_a_multiple_of_what_the_layout_cuts_them_into(overrides: list[str], multiple: int) -> None:
    assert token_multiple(run(*overrides)) == multiple


FEW_KEYS = DENSE | {"num_attention_heads": 12, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("description", "overrides", "expected"),
    [
        (DENSE, "parallel.tensor=16", ["parallel.tensor = 16: 8 attention heads; use one of [1, 2, 4, 8]"]),
        (FEW_KEYS, "parallel.tensor=6", ["parallel.tensor = 6: 4 key-value heads; use one of [1, 2, 4]"]),
        (FEW_KEYS, "parallel.tensor=12", ["parallel.tensor = 12: 320 rows; use one of [1, 2, 4]"]),
        (
            DENSE | {"intermediate_size": 92},
            "parallel.tensor=8",
            ["parallel.tensor = 8: 92 hidden units of the MLP; use one of [1, 2, 4]"],
        ),
        (
            GLM | {"moe_intermediate_size": 36},
            "parallel.tensor=8",
            ["parallel.tensor = 8: 36 hidden units of the shared experts; use one of [1, 2, 4]"],
        ),
        (DEEPSEEK, "parallel.tensor=3", ["parallel.tensor = 3: 8 attention heads; use one of [1, 2, 4, 8]"]),
        (
            DENSE,
            "parallel.pipeline=5 parallel.virtual_pipeline=7",
            ["parallel.pipeline = 5: 12 layers; [1, 2, 3, 4, 6, 12], or `parallel.last_stage_layers: 4`"],
        ),
        (DENSE, "parallel.pipeline=13", ["parallel.pipeline = 13: 12 layers; use one of [1, 2, 3, 4, 6, 12]"]),
        (
            DENSE,
            "parallel.pipeline=5 parallel.last_stage_layers=3",
            ["parallel.last_stage_layers = 3: 9 of the model's 12 layers; use one of [4, 8]"],
        ),
        (
            DENSE,
            "parallel.pipeline=2 parallel.virtual_pipeline=4",
            ["parallel.virtual_pipeline = 4: 6 layers; use one of [1, 2, 3, 6]"],
        ),
        (DENSE, "parallel.expert=2", ["parallel.expert = 2: Qwen3ForCausalLM; use 1"]),
        (QWEN_MOE, "parallel.expert=8", ["parallel.expert = 8: 12 experts; use one of [1, 2, 3, 4, 6, 12]"]),
        (GPT_OSS, "parallel.context=2", ["parallel.context = 2: GptOssForCausalLM; use 1"]),
        (
            DENSE,
            "parallel.pipeline=5 parallel.last_stage_layers=4 precision=fp8 fp8.bf16_layers_at_start=3 "
            "fp8.bf16_layers_at_end=5",
            [
                "fp8.bf16_layers_at_start = 3: 2 layers; use at most 2",
                "fp8.bf16_layers_at_end = 5: 4 layers; use at most 4",
            ],
        ),
        (
            DENSE,
            "precision=fp8 parallel.pipeline=6 fp8.bf16_layers_at_end=3",
            ["fp8.bf16_layers_at_end = 3: 2 layers; use at most 2"],
        ),
        (
            DENSE | {"num_key_value_heads": 1, "intermediate_size": 128},
            "precision=fp8 parallel.tensor=4 fp8.recipe=delayed",
            ["precision = 'fp8': 40 rows of queries, keys and values; `parallel.tensor`"],
        ),
        (
            DENSE,
            "precision=fp8 parallel.tensor=8 fp8.recipe=delayed",
            ["precision = 'fp8': multiple of 16 on a rank, which has 12; `precision: bf16`"],
        ),
    ],
)
def test_a_layout_that_the_model_does_not_allow_is_refused(
    description: dict[str, Any], overrides: str, expected: list[str]
) -> None:
    assert_named(against(description, *overrides.split()), *expected)


@pytest.mark.parametrize(
    ("description", "overrides"),
    [
        (DENSE, ["parallel.pipeline=5", "parallel.last_stage_layers=4"]),
        (DENSE, ["parallel.tensor=8"]),  # more ranks than key-value heads
        (DENSE | {"num_key_value_heads": 1}, ["parallel.tensor=4"]),
        (DENSE, ["parallel.tensor=2", "parallel.pipeline=3", "parallel.virtual_pipeline=2", "parallel.context=5"]),
        (QWEN_MOE | {"intermediate_size": 50}, ["parallel.tensor=4", "parallel.expert=6"]),  # no dense layer
        (GLM, ["parallel.tensor=8", "parallel.pipeline=12", "parallel.expert=12"]),
        (DEEPSEEK, ["parallel.tensor=8", "parallel.context=2"]),
        (GPT_OSS, ["parallel.tensor=8", "parallel.expert=4", "parallel.pipeline=2"]),
        (DENSE, ["precision=fp8", "parallel.tensor=2", "fp8.bf16_layers_at_start=12"]),
    ],
)
def test_layouts_that_the_model_allows_are_accepted(description: dict[str, Any], overrides: list[str]) -> None:
    assert against(description, *overrides) == []


@pytest.mark.parametrize("world_size", [12, 24, 48])
def test_layouts_that_fill_the_ranks_are_accepted(world_size: int) -> None:
    layout = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.context=3", "parallel.expert=6"]

    assert found(*layout, world_size=world_size) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["device=cpu", "precision=bf16"],
        ["device=cpu", "precision=fp32", "parallel.context=2"],
        ["precision=bf16", "parallel.context=2"],
        ["precision=fp8", "fp8.parameters=true"],
        ["precision=fp8", "fp8.parameters=true", "fp8.recipe=tensorwise", "parallel.tensor=2"],
        ["precision=fp8", "fp8.bf16_layers_at_start=1", "algorithm.kl_coefficient=0.1"],
        ["optimizer.warmup_steps=60", "optimizer.min_learning_rate=1e-7", "optimizer.schedule=linear"],
        ["proximal=recompute", "actor.minibatches=4"],
        ["proximal=reuse_target"],
        ["actor.microbatch_tokens=512", "actor.oversized=alone"],
        ["actor.microbatch_tokens=512", "parallel.context=4"],
    ],
)
def test_keys_that_go_together_are_accepted(overrides: list[str]) -> None:
    assert found(*overrides) == []


def test_many_mistakes_come_together() -> None:
    overrides = ["parallel.tensor=3", "parallel.virtual_pipeline=2", "parallel.expert=4", "actor.minibatches=5"]

    assert [mistake.key for mistake in found(*overrides, "optimizer.warmup_steps=301", world_size=9)] == [
        *("actor.minibatches", "optimizer.warmup_steps", "actor.microbatch_tokens", "parallel.virtual_pipeline"),
        "parallel.expert",
    ]
    assert [
        mistake.key for mistake in against(GLM, "parallel.tensor=36", "parallel.pipeline=5", "parallel.expert=5")
    ] == [
        *("parallel.tensor", "parallel.tensor", "parallel.tensor", "parallel.pipeline", "parallel.expert"),
    ]


def test_every_remedy_for_the_tensor_ranks_is_free_of_mistakes() -> None:
    for description in (DENSE, QWEN_MOE, GLM, DEEPSEEK, GPT_OSS):
        architecture: Architecture = read_architecture(description)
        for tensor in (3, 5, 7):
            for mistake in architecture_mistakes(run(f"parallel.tensor={tensor}"), architecture):
                fitting = mistake.remedy.removeprefix("use one of [").removesuffix("]").split(", ")
                assert fitting
                assert all(against(description, f"parallel.tensor={ranks}") == [] for ranks in fitting)

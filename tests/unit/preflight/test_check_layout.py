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
        (
            ["parallel.tensor=4", "actor.microbatch_tokens=1030"],
            None,
            "actor.microbatch_tokens = 1030: not a multiple of 4, to which microbatches are padded for "
            "parallel.tensor = 4; use 1032",
        ),
        (
            ["parallel.context=3", "actor.microbatch_tokens=1025"],
            None,
            "actor.microbatch_tokens = 1025: not a multiple of 2, to which microbatches are padded for "
            "parallel.context = 3; use 1026",
        ),
        (
            ["parallel.tensor=2", "precision=fp8", "actor.microbatch_tokens=1200"],
            None,
            "actor.microbatch_tokens = 1200: not a multiple of 256, to which microbatches are padded for "
            "parallel.tensor = 2, fp8.recipe = blockwise; use 1280",
        ),
        (
            ["parallel.context=2", "actor.microbatch_tokens=512"],
            None,
            "actor.microbatch_tokens = 512: a response of rollout.max_new_tokens = 1024 does not fit a microbatch of "
            "1024 tokens (x parallel.context), and would stop the run; raise it to the longest prompt and response "
            "together, or set `actor.oversized: alone`",
        ),
        (
            ["parallel.virtual_pipeline=2"],
            None,
            "parallel.virtual_pipeline = 2: one pipeline stage has nothing to interleave; use 1, or "
            "`parallel.pipeline` above 1",
        ),
        (
            ["parallel.tensor=2", "parallel.context=2"],
            6,
            "parallel = 'tensor 2 x pipeline 1 x context 2': needs 4 ranks or a multiple, and there are 6; "
            "start `torchrun --nproc-per-node 4 -m megatron_a3po train ...`, or change the layout",
        ),
        (
            ["parallel.pipeline=2", "parallel.expert=4"],
            12,
            "parallel.expert = 4: does not divide the 6 ranks of a pipeline stage; use one of [1, 2, 3, 6]",
        ),
        (
            ["rollout.prompts_per_step=1", "rollout.group_size=2"],
            3,
            "rollout.prompts_per_step = 1: 2 trajectories per batch cannot feed 3 data-parallel ranks; raise it, or "
            "start fewer ranks",
        ),
        (
            ["rollout.prompts_per_step=4", "rollout.group_size=2", "actor.minibatches=4"],
            4,
            "rollout.prompts_per_step = 4: 2 trajectories per minibatch cannot feed 4 data-parallel ranks; raise it, "
            "or start fewer ranks",
        ),
        (
            ["rollout.prompts_per_step=32", "actor.minibatches=5"],
            None,
            "actor.minibatches = 5: rollout.prompts_per_step = 32 groups do not divide into so many equal parts; use "
            "a divisor of 32, or 35 prompts per step",
        ),
        (
            ["parallel.last_stage_layers=1"],
            None,
            "parallel.last_stage_layers = 1: one pipeline stage has all layers; remove this key, or change "
            "`parallel.pipeline`",
        ),
        (
            ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.last_stage_layers=1"],
            None,
            "parallel.last_stage_layers = 1: interleaved stages are equally large; remove this key, or change "
            "`parallel.virtual_pipeline`",
        ),
    ],
)
def test_a_layout_that_the_ranks_or_the_batch_do_not_allow_is_refused(
    overrides: list[str], world_size: int | None, expected: str
) -> None:
    assert [str(mistake) for mistake in found(*overrides, world_size=world_size)] == [expected]


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


@pytest.mark.parametrize(
    ("description", "overrides", "expected"),
    [
        (
            DENSE,
            ["parallel.tensor=16"],
            ["parallel.tensor = 16: does not divide the model's 8 attention heads; use one of [1, 2, 4, 8]"],
        ),
        (
            DENSE | {"num_attention_heads": 12, "num_key_value_heads": 4},
            ["parallel.tensor=6"],
            [
                "parallel.tensor = 6: neither a divisor nor a multiple of the model's 4 key-value heads; use one of "
                "[1, 2, 4]"
            ],
        ),
        (
            DENSE | {"num_attention_heads": 12, "num_key_value_heads": 4},
            ["parallel.tensor=12"],
            [
                "parallel.tensor = 12: does not divide the 320 rows of the model's queries, keys and values; use one "
                "of [1, 2, 4]"
            ],
        ),
        (
            DENSE | {"intermediate_size": 92},
            ["parallel.tensor=8"],
            ["parallel.tensor = 8: does not divide the model's 92 hidden units of the MLP; use one of [1, 2, 4]"],
        ),
        (
            DENSE,
            ["parallel.pipeline=5", "parallel.virtual_pipeline=7"],
            [
                "parallel.pipeline = 5: does not divide the model's 12 layers; use one of [1, 2, 3, 4, 6, 12], "
                "or `parallel.last_stage_layers: 4`"
            ],
        ),
        (
            DENSE,
            ["parallel.pipeline=13"],
            ["parallel.pipeline = 13: does not divide the model's 12 layers; use one of [1, 2, 3, 4, 6, 12]"],
        ),
        (DENSE, ["parallel.pipeline=5", "parallel.last_stage_layers=4"], []),
        (
            DENSE,
            ["parallel.pipeline=5", "parallel.last_stage_layers=3"],
            [
                "parallel.last_stage_layers = 3: leaves 9 of the model's 12 layers to 4 other pipeline stages; "
                "use one of [4, 8]"
            ],
        ),
        (
            DENSE,
            [
                *("parallel.pipeline=5", "parallel.last_stage_layers=4", "precision=fp8"),
                *("fp8.bf16_layers_at_start=3", "fp8.bf16_layers_at_end=5"),
            ],
            [
                "fp8.bf16_layers_at_start = 3: a pipeline stage has 2 layers, and Megatron takes no more than one "
                "stage; use at most 2",
                "fp8.bf16_layers_at_end = 5: a pipeline stage has 4 layers, and Megatron takes no more than one "
                "stage; use at most 4",
            ],
        ),
        (
            DENSE,
            ["parallel.pipeline=2", "parallel.virtual_pipeline=4"],
            [
                "parallel.virtual_pipeline = 4: does not divide the 6 layers of a pipeline stage; use one of "
                "[1, 2, 3, 6]"
            ],
        ),
        (DENSE, ["parallel.expert=2"], ["parallel.expert = 2: Qwen3ForCausalLM has no experts; use 1"]),
        (
            QWEN_MOE,
            ["parallel.expert=8"],
            ["parallel.expert = 8: does not divide the model's 12 experts; use one of [1, 2, 3, 4, 6, 12]"],
        ),
        (
            GLM | {"moe_intermediate_size": 36},
            ["parallel.tensor=8"],
            [
                "parallel.tensor = 8: does not divide the 36 hidden units of the shared experts; use one of [1, 2, 4]",
            ],
        ),
        (
            DEEPSEEK,
            ["parallel.tensor=3"],
            ["parallel.tensor = 3: does not divide the model's 8 attention heads; use one of [1, 2, 4, 8]"],
        ),
        (
            GPT_OSS,
            ["parallel.context=2"],
            [
                "parallel.context = 2: the attention of GptOssForCausalLM, with windows and sinks, is not shared "
                "among ranks; use 1"
            ],
        ),
        (
            DENSE,
            ["precision=fp8", "parallel.pipeline=6", "fp8.bf16_layers_at_end=3"],
            [
                "fp8.bf16_layers_at_end = 3: a pipeline stage has 2 layers, and Megatron takes no more than one stage; "
                "use at most 2"
            ],
        ),
        (
            DENSE | {"num_key_value_heads": 1, "intermediate_size": 128},
            ["precision=fp8", "parallel.tensor=4", "fp8.recipe=delayed"],
            [
                "precision = 'fp8': a rank's 40 rows of queries, keys and values are not a multiple of 16, as "
                "`fp8.recipe: delayed` needs; use a smaller `parallel.tensor`, or `precision: bf16`"
            ],
        ),
        (
            DENSE,
            ["precision=fp8", "parallel.tensor=8", "fp8.recipe=delayed"],
            [
                "precision = 'fp8': a rank's 12 hidden units of the MLP are not a multiple of 16, as "
                "`fp8.recipe: delayed` needs; use a smaller `parallel.tensor`, or `precision: bf16`"
            ],
        ),
    ],
)
def test_a_layout_that_the_model_does_not_allow_is_refused(
    description: dict[str, Any], overrides: list[str], expected: list[str]
) -> None:
    assert [str(mistake) for mistake in against(description, *overrides)] == expected


@pytest.mark.parametrize(
    ("description", "overrides"),
    [
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
    ("overrides", "expected"),
    [
        (["fp8.recipe=mxfp8"], "fp8.recipe = 'mxfp8': nothing is computed in FP8 with `precision: bf16`"),
        (["precision=fp32", "fp8.parameters=true"], "fp8.parameters = True: nothing is computed in FP8 with"),
        (["fp8.bf16_layers_at_start=1"], "fp8.bf16_layers_at_start = 1: nothing is computed in FP8"),
        (
            ["precision=fp8", "fp8.parameters=true", "parallel.tensor=2"],
            "fp8.parameters = True: with `fp8.recipe: blockwise` and parallel.tensor = 2, log-probs were NaN from the "
            "second step on (NeMo-RL, issue 1164); set `fp8.parameters: false`",
        ),
        (
            ["precision=fp8", "fp8.parameters=true", "fp8.recipe=tensorwise", "algorithm.kl_coefficient=0.1"],
            "fp8.parameters = True: algorithm.kl_coefficient = 0.1 lends the storage of the weights",
        ),
        (
            ["precision=fp8", "fp8.parameters=true", "fp8.recipe=tensorwise", "optimizer.offload=true"],
            "fp8.parameters = True: with `optimizer.offload: true`, Megatron's optimizer on the host has no parameters",
        ),
        (
            ["precision=fp8", "fp8.parameters=true", "fp8.recipe=delayed"],
            "fp8.parameters = True: with `fp8.recipe: delayed`, the weights that the run starts from are rounded",
        ),
        (
            ["precision=fp8", "fp8.recipe=delayed", "fp8.bf16_layers_at_end=1"],
            "fp8.bf16_layers_at_end = 1: Megatron has no bf16 layers beside `fp8.recipe: delayed`; use 0, or another",
        ),
        (
            ["device=cpu", "precision=fp8"],
            "precision = 'fp8': not with `device: cpu`: FP8 is Transformer Engine's, and without it Megatron would "
            "silently compute unquantised; use `precision: bf16` or `precision: fp32`",
        ),
        (
            ["precision=fp32", "parallel.context=2"],
            "parallel.context = 2: Transformer Engine shares no attention in float32 among ranks; use 1, or",
        ),
        (
            ["checkpoint={every_steps: 5, keep_every: 7}"],
            "checkpoint.keep_every = 7: checkpoints are saved at multiples",
        ),
        (["checkpoint={every_steps: 0, keep_every: 7}"], "checkpoint.keep_every = 7: none is saved; set"),
        (["device=cpu", "optimizer.offload=true"], "optimizer.offload = True: with `device: cpu` the optimizer's"),
        (
            ["precision=fp32", "optimizer.offload=true"],
            "optimizer.offload = True: Megatron offloads the float32 masters",
        ),
        (
            ["proximal=reuse_target", "actor.minibatches=2"],
            "proximal = 'reuse_target': stands for the policy before the step in the first of 2 optimizer steps on a "
            "batch only, and nothing would bound the others; use `recompute` or `loglinear`, or",
        ),
        (
            ["optimizer.warmup_steps=121", "actor.minibatches=2"],
            "optimizer.warmup_steps = 121: the run ends after 120 optimizer steps",
        ),
        (
            ["optimizer.min_learning_rate=1e-5", "optimizer.schedule=cosine"],
            "optimizer.min_learning_rate = 1e-05: above optimizer.learning_rate = 1e-06",
        ),
        (
            ["optimizer.min_learning_rate=1e-7"],
            "optimizer.min_learning_rate = 1e-07: does nothing with `optimizer.schedule: constant`",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides: list[str], expected: str) -> None:
    (mistake,) = found(*overrides)

    assert str(mistake).startswith(expected) and mistake.remedy


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

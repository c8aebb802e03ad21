"""The memory estimate is arithmetic that can be done by hand, and moves the way that memory does."""

import re
from typing import Any

import pytest
import torch
import transformers

from megatron_a3po.config import RunConfig
from megatron_a3po.config.yaml_files import parse_overrides
from megatron_a3po.parallel import vocab_parallel
from megatron_a3po.preflight.architecture import Architecture
from megatron_a3po.preflight.families import read_architecture
from megatron_a3po.preflight.memory import (
    TILE_ELEMENTS,
    MemoryEstimate,
    estimate_memory,
    layer_activation_bytes,
    memory_table,
    padded_vocab_size,
    rank_parameters,
)

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
GLM: dict[str, Any] = QWEN3_8B | {
    "architectures": ["Glm4MoeForCausalLM"],
    "num_hidden_layers": 24,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
}
DEEPSEEK: dict[str, Any] = GLM | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GIB = 2**30


def run(*overrides: str) -> RunConfig:
    values: dict[str, Any] = {"model": "nowhere", "run_dir": "runs/x", "num_steps": 60, "data": {"task": "x"}}
    assert parse_overrides(values, overrides) == []
    return RunConfig.model_validate(values)


def estimate(description: dict[str, Any], world_size: int, *overrides: str) -> MemoryEstimate:
    return estimate_memory(run(*overrides), read_architecture(description), world_size)


LAYOUTS = [
    {},
    {"tensor": 2},
    {"pipeline": 3},
    {"pipeline": 2, "virtual_pipeline": 3, "context": 2},
    {"tensor": 4, "pipeline": 2, "expert": 8},
    {"pipeline": 4, "last_stage_layers": 3},
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "description",
    [QWEN3_8B, QWEN3_8B | {"tie_word_embeddings": True, "vocab_size": 151_937}, GLM, DEEPSEEK],
    ids=["dense", "tied", "experts", "latent"],
)
def test_parameters_of_all_ranks_are_the_models_with_padding_and_copies(
    description: dict[str, Any], layout: dict[str, int]
) -> None:
    architecture, parallel = (
        read_architecture(description),
        run(*(f"parallel.{k}={v}" for k, v in layout.items())).parallel,
    )
    if architecture.experts is None:
        parallel = parallel.model_copy(update={"expert": 1})
    tensor, pipeline = parallel.tensor, parallel.pipeline
    held = 0
    for stage in range(pipeline):
        rank = rank_parameters(parallel, architecture, stage)
        held += rank.dense * tensor + rank.experts * parallel.expert

    replicated = sum(architecture.layer_parameters(index).replicated for index in range(architecture.num_layers))
    copies = (replicated + architecture.hidden_size) * (tensor - 1)
    tables = 1 if architecture.tied_embeddings and pipeline == 1 else 2
    padding = (padded_vocab_size(parallel, architecture) - architecture.vocab_size) * architecture.hidden_size
    if architecture.tied_embeddings and pipeline > 1:
        copies += architecture.embedding_parameters
    assert held == architecture.num_parameters + copies + tables * padding


def test_an_8b_model_on_four_ranks_is_what_one_computes_by_hand() -> None:
    layout = ("parallel.tensor=2", "parallel.pipeline=2")
    rank = estimate(QWEN3_8B, 4, *layout)

    hidden, kv, mlp = 4096, 1024, 12288
    layer = (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp) // 2 + 2 * hidden + 2 * 128
    parameters = 18 * layer + 151936 // 2 * hidden
    # Norms; queries, keys and their norms' inputs; values and output; MLP. And a float32 normaliser per head.
    per_token = 2 * (4 * hidden + 2 * (hidden + kv) + kv + hidden + 3 * mlp) + 4 * 32
    assert rank.parameters.total == parameters == 2_047_758_848
    assert (rank.stage, rank.microbatches_in_flight) == (0, 2)
    assert (rank.weights, rank.gradients, rank.optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)
    assert rank.activations == 8192 // 2 * 2 * 18 * per_token
    assert rank.total == 18 * parameters + rank.activations
    assert 53 < rank.total / GIB < 54


def test_the_last_stage_of_the_8b_model_has_the_output_layer() -> None:
    layout = ("parallel.tensor=2", "actor.output_layer=logits", "actor.activation_recompute=full")
    rank = estimate(QWEN3_8B, 2, *layout)
    columns = 151936 // 2

    assert rank.output_layer == "logits"
    assert rank.logits == 2 * 8192 * columns * 2 + 2 * 4 * TILE_ELEMENTS["cuda"]
    fused = estimate(QWEN3_8B, 2, *layout[:1], layout[2], "actor.output_layer=fused")
    assert fused.logits == 2 * 4 * TILE_ELEMENTS["cuda"] + 4096 * (8192 * (2 + 4 + 2) + columns * (4 + 2))


@pytest.mark.parametrize(("tokens", "chosen"), [(6899, "logits"), (7065, "fused")])
def test_large_logits_are_fused_away(tokens: int, chosen: str) -> None:
    """1 GiB for the logits and their gradient, in bf16, is 7064 tokens of 38,000 columns."""
    description = QWEN3_8B | {"vocab_size": 38_000}

    assert estimate(description, 1, f"actor.microbatch_tokens={tokens}").output_layer == chosen


def test_tiles_are_as_large_as_those_of_the_log_probs() -> None:
    assert TILE_ELEMENTS == {"cpu": vocab_parallel._TILE_ELEMENTS, "cuda": vocab_parallel._TILE_ELEMENTS_CUDA}


def test_the_optimizer_is_sharded_over_data_and_context_ranks_and_experts_over_theirs() -> None:
    layout = ("parallel.tensor=2", "parallel.context=2", "parallel.expert=4")
    rank = estimate(GLM, 16, *layout)

    dense, experts = rank.parameters.dense, rank.parameters.experts
    assert experts == 23 * 16 * 3 * 4096 * 1408
    assert rank.optimizer == 12 * (-(-dense // 8) + -(-experts // 4))
    fp32 = estimate(GLM, 16, *layout, "precision=fp32")
    assert (fp32.weights, fp32.gradients) == (4 * rank.parameters.total, rank.gradients)
    assert fp32.optimizer * 3 == rank.optimizer * 2


def test_offload_and_a_reference_policy_live_in_host_memory() -> None:
    here, there = estimate(QWEN3_8B, 1), estimate(QWEN3_8B, 1, "optimizer.offload=true")

    assert (there.optimizer, there.host, here.host) == (0, here.optimizer // 3 * 4, 0)
    assert there.total == here.total - here.optimizer
    assert estimate(QWEN3_8B, 1, "algorithm.kl_coefficient=0.1").host == 2 * here.weights


def test_fp8_keeps_two_copies_of_the_matrices_beside_the_weights_or_in_their_place() -> None:
    bf16, fp8 = estimate(QWEN3_8B, 1), estimate(QWEN3_8B, 1, "precision=fp8")
    matrices = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)

    assert fp8.weights == bf16.weights + 2 * matrices
    assert estimate(QWEN3_8B, 1, "precision=fp8", "fp8.parameters=true").weights == bf16.weights


def test_the_last_stage_may_hold_another_number_of_layers() -> None:
    """DeepSeek-V3's 61 layers, the first three of them dense, on eight stages: seven of eight, and five."""
    architecture = read_architecture(DEEPSEEK | {"num_hidden_layers": 61, "first_k_dense_replace": 3})
    parallel = run("parallel.pipeline=8", "parallel.last_stage_layers=5").parallel
    of_expert_layer = architecture.layer_parameters(60).experts

    experts = [rank_parameters(parallel, architecture, stage).experts for stage in range(8)]
    assert experts == [count * of_expert_layer for count in (5, 8, 8, 8, 8, 8, 8, 5)]


@pytest.mark.parametrize(
    ("layout", "chunks"),
    [
        ({"pipeline": 4}, 4),
        ({"pipeline": 4, "virtual_pipeline": 3}, 4 * 3 + 4 - 1),
        ({"pipeline": 2, "virtual_pipeline": 2}, 2 * 2 + 2 - 1),
    ],
)
def test_the_first_stage_holds_the_most_forward_passes(layout: dict[str, int], chunks: int) -> None:
    """Narayanan et al. 2021: as many as stages; interleaved, more of them by (pipeline - 1) chunks."""
    rank = estimate(QWEN3_8B, 8, *(f"parallel.{key}={value}" for key, value in layout.items()))
    virtual = layout.get("virtual_pipeline", 1)

    assert rank.stage == 0 and rank.microbatches_in_flight == pytest.approx(chunks / virtual)
    per_layer = layer_activation_bytes(read_architecture(QWEN3_8B), 0, 2)
    assert rank.activations == 8192 * per_layer * chunks * 36 // (layout["pipeline"] * virtual)


def test_memory_falls_with_every_kind_of_sharding_and_with_recomputation() -> None:
    base = estimate(GLM, 16)
    for overrides in (
        ["parallel.tensor=2"],
        ["parallel.expert=2"],
        ["actor.activation_recompute=selective"],
        ["actor.activation_recompute=full"],
        ["actor.microbatch_tokens=4096"],
        ["optimizer.offload=true"],
    ):
        assert estimate(GLM, 16, *overrides).total < base.total
    assert estimate(GLM, 32).total < base.total and estimate(GLM, 32).weights == base.weights
    assert estimate(GLM, 16, "parallel.pipeline=2").weights < base.weights
    recompute = [
        estimate(GLM, 16, f"actor.activation_recompute={mode}").activations for mode in ("none", "selective", "full")
    ]
    assert recompute == sorted(recompute, reverse=True) and recompute[2] * 5 < recompute[0]
    assert estimate(GLM, 16, "actor.microbatch_tokens=16384").activations == 2 * base.activations


def test_the_table_names_every_use_and_its_sum() -> None:
    lines = memory_table(estimate(QWEN3_8B, 4, "parallel.tensor=2", "parallel.pipeline=2"))

    assert [line.split()[0] for line in lines[1:]] == [
        *("weights", "gradients", "optimizer", "activations", "logits", "total", "saving", "saving"),
    ]
    assert "pipeline stage 0" in lines[0]
    sizes = dict(re.findall(r"^  ([a-z ]+?) {2,}([\d.]+ [GM]iB)", "\n".join(lines), re.MULTILINE))
    assert (sizes["weights"], sizes["total"], sizes["saving host"]) == ("3.81 GiB", "53.19 GiB", "22.89 GiB")
    offloaded = memory_table(estimate(QWEN3_8B, 1, "optimizer.offload=true"))
    assert offloaded[-3].split() == ["host", "122.05", "GiB", "host", "memory"]


def test_a_checkpoint_gathers_the_optimizer_on_every_rank() -> None:
    """Twelve bytes per parameter of a rank in host memory, and of one bucket four on the device, with its shard."""
    layout = ("parallel.tensor=2", "parallel.pipeline=2")
    two_stages, architecture = estimate(QWEN3_8B, 16, *layout), read_architecture(QWEN3_8B)
    parameters = [rank_parameters(run(*layout).parallel, architecture, stage).total for stage in (0, 1)]

    assert two_stages.saving_host == 12 * max(parameters)
    held = [6 * size + 12 * size // 4 for size in parameters]
    assert two_stages.saving == max(held[0], held[1] + 4 * parameters[1] + parameters[1]), "small buckets on stage 0"
    one_stage = estimate(QWEN3_8B, 4)
    assert one_stage.saving == one_stage.weights + one_stage.gradients + one_stage.optimizer
    without = estimate(QWEN3_8B, 4, "parallel.overlap=false")
    assert without.saving == one_stage.saving + 5 * one_stage.parameters.total
    experts = estimate(GLM, 16, "parallel.expert=4", "parallel.overlap=false")
    kept = experts.weights + experts.gradients + experts.optimizer
    assert experts.saving == kept + 4 * experts.parameters.experts * 5 // 4


def saved_bytes_per_token(family: str, sizes: dict[str, Any], layers: int) -> int:
    """What autograd keeps of a Hugging Face model's forward pass, parameters aside."""
    config = getattr(transformers, f"{family}Config")(**sizes, num_hidden_layers=layers, attn_implementation="sdpa")
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens = 64
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _output = model(input_ids=torch.arange(tokens)[None], use_cache=False)
    kept = [tensor.untyped_storage().nbytes() for pointer, tensor in saved.items() if pointer not in parameters]
    return sum(kept) // tokens


SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2}
LATENT_SIZES = {"q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERT_SIZES = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


@pytest.mark.parametrize(
    ("family", "sizes", "unfused"),
    [
        ("Llama", {"head_dim": 16}, 0),
        ("Qwen3", {"head_dim": 16}, (8 + 2) * (16 + 1)),
        # Queries wider than values have no kernel here that forgets the scores: 64 of them instead of a normaliser.
        (
            "DeepseekV3",
            LATENT_SIZES | EXPERT_SIZES | {"num_key_value_heads": 8, "first_k_dense_replace": 4, "n_group": 1},
            40 + 1 + 24 + 1 + 8 * (64 - 1),
        ),
    ],
)
def test_a_layer_keeps_what_autograd_keeps_but_for_what_fused_kernels_compute_again(
    family: str, sizes: dict[str, Any], unfused: int
) -> None:
    sizes = SIZES | {"vocab_size": 64, "max_position_embeddings": 64} | sizes
    architecture: Architecture = read_architecture(
        sizes | {"num_hidden_layers": 1, "architectures": [f"{family}ForCausalLM"]}
    )
    measured = (saved_bytes_per_token(family, sizes, 4) - saved_bytes_per_token(family, sizes, 2)) // 2

    # Transformers' norms keep the value before its weight, and the norm; its MLP the activated gate.
    unfused += 2 * (128 + 1) + 384
    assert measured == layer_activation_bytes(architecture, 0, 4) + 4 * unfused

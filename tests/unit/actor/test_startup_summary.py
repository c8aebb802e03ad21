"""What a run says before it starts: the facts of its layout, model, precision, memory and kernels."""

import re
from typing import Any

import pytest

from megatron_a3po.actor.fusions import Fusions
from megatron_a3po.actor.summary import startup_summary
from megatron_a3po.config import RunConfig
from megatron_a3po.config.yaml_files import parse_overrides
from megatron_a3po.preflight.architecture import Architecture
from megatron_a3po.preflight.families import read_architecture
from megatron_a3po.preflight.memory import estimate_memory, rank_parameters, readable_bytes, readable_count
from tests.unit.preflight.test_memory import GLM, QWEN3_8B

TINY: dict[str, Any] = QWEN3_8B | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 259}
PLAIN = Fusions(transformer_engine=None, optimizer="torch AdamW", gradient_accumulation=False)
FUSED = Fusions(transformer_engine=(2, 20), optimizer="FusedAdam of Transformer Engine", gradient_accumulation=True)


def configuration(*overrides: str) -> RunConfig:
    values: dict[str, Any] = {"model": "nowhere", "run_dir": "runs/x", "num_steps": 60, "data": {"task": "x"}}
    assert parse_overrides(values, overrides) == []
    return RunConfig.model_validate(values)


def summary(description: dict[str, Any], world_size: int, *overrides: str, fusions: Fusions = FUSED) -> str:
    architecture = read_architecture(description)
    return "\n".join(startup_summary(configuration(*overrides), architecture, fusions, world_size=world_size))


def line(text: str, start: str) -> str:
    """The one line that starts so."""
    (found,) = [line for line in text.splitlines() if line.startswith(start)]
    return found


def layout(text: str) -> set[str]:
    return set(re.findall(r"\b(?:TP|PP|CP|DP)\d+", line(text, "layout")))


def test_a_tiny_model_on_the_cpu_has_one_rank_kept_logits_and_unfused_layers() -> None:
    text = summary(TINY, 1, "device=cpu", "precision=fp32", fusions=PLAIN)
    assert layout(text) == {"DP1"} and "1 rank = " in line(text, "layout")
    model = line(text, "model")
    assert "fp32" in model and f"{readable_count(read_architecture(TINY).num_parameters)} on rank 0" in model
    assert line(text, "output layer").startswith("output layer: logits")
    assert "Transformer Engine is not installed" in line(text, "layers")
    assert "torch AdamW" in line(text, "optimizer")
    assert "not fused" in line(text, "gradient accumulation")


def test_an_8b_model_in_a_three_dimensional_layout_has_each_axis_and_the_ranks_left_for_data() -> None:
    overrides = ("parallel={tensor: 2, pipeline: 2, context: 2}", "precision=bf16", "actor.microbatch_tokens=16384")
    text = summary(QWEN3_8B, 16, *overrides)
    assert layout(text) == {"TP2", "PP2", "CP2", "DP2"}
    assert "16 ranks" in line(text, "layout") and "sequence parallel" in line(text, "layout")
    architecture: Architecture = read_architecture(QWEN3_8B)
    model = line(text, "model")
    assert architecture.name in model and "bf16" in model
    assert f"{readable_count(architecture.num_parameters)} parameters" in model
    on_rank_0 = rank_parameters(configuration(*overrides).parallel, architecture, stage=0).total
    assert f"{readable_count(on_rank_0)} on rank 0" in model
    assert line(text, "output layer").startswith("output layer: fused")
    assert "2.20" in line(text, "layers")


def test_the_size_of_the_logits_stands_beside_the_choice_of_the_output_layer() -> None:
    # 8,192 tokens x 151,936 words x 2 bytes, and the same again for the gradient
    expected = readable_bytes(2 * 8192 * 151_936 * 2)
    assert expected in line(summary(QWEN3_8B, 1), "output layer")
    chosen = line(summary(QWEN3_8B, 1, "actor.output_layer=logits"), "output layer")
    assert chosen.startswith("output layer: logits") and expected in chosen and "configuration" in chosen


@pytest.mark.parametrize("stages", [1, 2])
def test_the_memory_estimate_is_part_of_it_with_its_total(stages: int) -> None:
    overrides = f"parallel.pipeline={stages}"
    total = estimate_memory(configuration(overrides), read_architecture(QWEN3_8B), 8).total
    assert readable_bytes(total) in line(summary(QWEN3_8B, 8, overrides), "  total")


@pytest.mark.parametrize(("parameters", "kept"), [("true", "fp8"), ("false", "bf16")])
def test_fp8_names_its_recipe_and_what_the_weights_are_kept_in(parameters: str, kept: str) -> None:
    text = summary(QWEN3_8B, 8, "precision=fp8", "fp8.recipe=tensorwise", f"fp8.parameters={parameters}")
    assert line(text, "model").endswith(f"fp8 tensorwise, weights in {kept}")


def test_experts_and_interleaved_chunks_are_part_of_the_layout_and_do_not_divide_the_data_ranks() -> None:
    text = summary(GLM, 32, "parallel={tensor: 2, pipeline: 2, virtual_pipeline: 3, expert: 8}")
    assert layout(text) == {"TP2", "PP2", "DP8"}
    assert "3 interleaved chunks" in line(text, "layout") and "among 8 ranks" in line(text, "layout")
    plain = line(summary(GLM, 4), "layout")
    assert "chunks" not in plain and "experts" not in plain


def test_communication_says_what_overlaps_with_what() -> None:
    off = line(summary(QWEN3_8B, 8, "parallel.overlap=false"), "communication")
    one = line(summary(QWEN3_8B, 8), "communication")
    several = line(summary(QWEN3_8B, 8, "actor.minibatches=2"), "communication")
    assert "parallel.overlap" in off
    assert "backward" in one and "backward" in several
    # Only between two steps on one batch is there a forward pass to gather the parameters in.
    assert "forward" in several and "forward" not in one

"""What docs/extending.md tells a developer to add works."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig

from megatron_a3po.algorithm import proximal
from megatron_a3po.algorithm.objective import Objective
from megatron_a3po.config.schema import AlgorithmConfig, ProximalMethod
from megatron_a3po.preflight import families, variants
from megatron_a3po.preflight.families import read_architecture
from megatron_a3po.types import Microbatch
from tests.support.objective_run import METHODS, VERSION, batch, objective, run
from tests.support.pages import blocks

SNIPPETS = blocks("docs/extending.md", "python")


def test_a_proximal_method_is_a_function_and_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proximal, "INTERPOLATIONS", dict(proximal.INTERPOLATIONS))
    exec(SNIPPETS[0], {})
    loss = Objective(proximal="older", loss=AlgorithmConfig().loss_options())
    microbatch, theta, entropy = batch()
    theirs = run(objective("recompute"), _with_recomputed(microbatch, theta), theta, entropy)
    ours = run(loss, microbatch, theta, entropy)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=0, atol=0)
    torch.testing.assert_close(ours.on_logprobs, theirs.on_logprobs, rtol=0, atol=0)


def _with_recomputed(microbatch: Microbatch, theta: Tensor) -> Microbatch:
    """The same proximal policy, given as log-probs of a forward pass."""
    b, fresh = microbatch.behaviour_logprobs, microbatch.weight_versions == VERSION
    return replace(microbatch, recomputed_logprobs=torch.where(fresh | (theta < b), theta, b))


def test_every_method_that_a_configuration_may_name_is_there() -> None:
    assert set(get_args(ProximalMethod)) == set(METHODS) > set(proximal.INTERPOLATIONS)


def test_a_dense_model_is_its_name_and_what_the_bridge_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "SUPPORTED_ARCHITECTURES", families.SUPPORTED_ARCHITECTURES)
    monkeypatch.setattr(variants, "_BUILT", dict(variants._BUILT))
    exec(SNIPPETS[1], {})
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 77}
    described = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=None)
    described.architectures = ["MistralForCausalLM"]
    model = AutoModelForCausalLM.from_config(described)
    assert read_architecture(described.to_dict()).num_parameters == model.num_parameters()
    assert list(variants.unbuilt_variants(described.to_dict() | {"sliding_window": 8})) == [
        ("sliding_window", 8, "None")
    ]

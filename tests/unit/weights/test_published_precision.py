"""In which precision weights are published, by what the servers say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_a3po.errors import PublishError
from megatron_a3po.hf.quantize import quantization_config
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.weights.plan import PartSpec
from megatron_a3po.weights.served_precision import fp8_rule, in_served_precision, served_quantization
from tests.support.publishing import fleet_of, serve
from tests.support.scripted_server import answer, refuse

URLS = ("http://a:1", "http://b:2")


def folder_of(path: Path, config: dict[str, Any] | None) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    return str(path)


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=torch.bfloat16, shape=shape or (8, 8))


def test_servers_get_what_their_folder_has_the_trainers_precision_or_fp8_for_the_layers_linear_weights(
    tmp_path: Path,
) -> None:
    path = folder_of(tmp_path / "bf16", None)
    config = served_quantization([(url, path, None) for url in URLS])
    assert config is None and not fp8_rule(config)(spec("model.layers.0.mlp.up_proj.weight"))

    stored = quantization_config(["lm_head", "model.layers.1.mlp.gate"])
    path = folder_of(tmp_path / "fp8", stored)
    config = served_quantization([(URLS[0], path, None), (URLS[1], path, "fp8")])
    assert config == stored
    rule = fp8_rule(config)
    names = {
        "model.layers.0.self_attn.q_proj.weight": True,
        "model.layers.1.mlp.gate_proj.weight": True,  # mlp.gate is another module
        "model.layers.1.mlp.experts.7.down_proj.weight": True,
        "model.layers.1.mlp.gate.weight": False,
        "model.layers.0.input_layernorm.weight": False,
        "model.embed_tokens.weight": False,
        "lm_head.weight": False,
    }
    assert {name: rule(spec(name)) for name in names} == names
    assert not rule(spec("model.layers.0.self_attn.q_proj.bias", 8))


def test_a_weight_in_fp8_comes_with_its_scales() -> None:
    kept, weight = spec("model.norm.weight", 300), spec("model.layers.0.mlp.up_proj.weight", 300, 128)
    part = PartSpec(shapes={"w": (300, 128)}, tensors=(kept, weight))
    served = in_served_precision(part, fp8_rule(quantization_config()))
    assert served.shapes == part.shapes
    assert [(each.name, each.dtype, each.shape) for each in served.tensors] == [
        (kept.name, torch.bfloat16, (300,)),
        (weight.name, torch.float8_e4m3fn, (300, 128)),
        (weight.name + "_scale_inv", torch.float32, (3, 1)),
    ]


@pytest.mark.parametrize(
    ("entry", "kept", "in_fp8"),
    [
        ("model.layers.0", "0.self_attn.o_proj", "10.mlp.down_proj"),
        ("layers.0.self_attn", "0.self_attn.o_proj", "10.mlp.down_proj"),
        ("self_attn", "0.self_attn.o_proj", "10.mlp.down_proj"),
        ("model.layers.0.self_attn.o_proj", "0.self_attn.o_proj", "10.mlp.down_proj"),
        # One expert keeps all of its layer.
        ("model.layers.3.mlp.experts.0.up_proj", "3.mlp.experts.5.down_proj", "30.mlp.experts.5.down_proj"),
    ],
)
def test_modules_that_the_server_keeps_are_published_as_they_are(entry: str, kept: str, in_fp8: str) -> None:
    rule = fp8_rule(quantization_config([entry]))
    assert not rule(spec(f"model.layers.{kept}.weight"))
    assert rule(spec(f"model.layers.{in_fp8}.weight"))


def test_a_fused_module_of_two_precisions_is_an_error() -> None:
    rule = fp8_rule(quantization_config(["model.layers.0.self_attn.q_proj"]))
    with pytest.raises(PublishError, match=r"q_proj, k_proj, v_proj in model\.layers\.0\.self_attn"):
        rule(spec("model.layers.0.self_attn.k_proj.weight"))


@pytest.mark.parametrize(
    ("config", "quantization", "words"),
    [
        (None, "fp8", "--quantization fp8"),
        ({"quant_method": "awq"}, None, "awq"),
        ({"quant_method": "fp8"}, None, "128 x 128"),
        (quantization_config() | {"scale_fmt": "ue8m0"}, None, "ue8m0"),
        (quantization_config() | {"weight_block_size": [64, 64]}, None, "64"),
    ],
)
def test_what_cannot_be_published_is_an_error_that_names_the_server(
    tmp_path: Path, config: dict[str, Any] | None, quantization: str | None, words: str
) -> None:
    path = folder_of(tmp_path / "served", config)
    with pytest.raises(PublishError, match=rf"{URLS[0]}.*{words}"):
        served_quantization([(URLS[0], path, quantization)])


def test_servers_of_different_precisions_and_a_folder_not_seen_here_are_errors_with_names(tmp_path: Path) -> None:
    paths = [folder_of(tmp_path / "bf16", None), folder_of(tmp_path / "fp8", quantization_config())]
    with pytest.raises(PublishError, match=f"{URLS[1]} and {URLS[0]}"):
        served_quantization([(url, path, None) for url, path in zip(URLS, paths, strict=True)])
    for quantization in (None, "fp8"):
        with pytest.raises(PublishError, match=f"{URLS[0]}.*/nowhere/model.*make the folder visible"):
            served_quantization([(URLS[0], "/nowhere/model", quantization)])


TENSORS: dict[str, tuple[list[str], list[str], bool]] = {
    "unquantised": (["norm.weight", "experts.w13_weight", "qkv_proj.bias", "attn.sinks"], [], True),
    "FP8 in blocks": (["norm.weight", "qkv_proj.weight"], ["qkv_proj.weight"], False),
    "FP8 with one scale": (["norm.weight", "qkv_proj.weight", "qkv_proj.weight_scale"], [], False),
    "experts in FP8": (["norm.weight", "experts.w13_weight", "experts.w13_weight_scale"], [], False),
    "GPTQ": (["norm.weight", "qkv_proj.qweight"], [], False),
    "unknown": ([], [], False),
}


@pytest.mark.parametrize("case", TENSORS)
def test_of_a_server_whose_folder_is_not_seen_here_the_tensors_tell_whether_it_is_unquantised(case: str) -> None:
    """What SGLang tells of servers in FP8 was found with its own code, in tests/e2e/test_served_precision.py."""
    names, in_fp8_blocks, is_unquantised = TENSORS[case]
    with serve(None) as (server,):
        server.checksums, server.in_fp8_blocks = dict.fromkeys(names, "00ff"), set(in_fp8_blocks)
        server.script("/server_info", answer({"model_path": "/nowhere/model"}))
        with fleet_of(server.url) as fleet:
            served = fleet.served_models
            assert served == [(server.url, "/nowhere/model", "unquant" if is_unquantised else None)]
            if is_unquantised:
                assert served_quantization(served) is None
            server.script("/weights_checker", refuse(400, "disabled"))
            assert fleet.served_models == [(server.url, "/nowhere/model", None)]


def test_a_server_whose_folder_is_seen_here_is_not_asked_for_its_tensors(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "fp8", quantization_config())
    with serve(None) as (server,):
        server.script("/server_info", answer({"model_path": path}))
        with fleet_of(server.url) as fleet:
            assert fleet.served_models == [(server.url, path, None)]
        assert server.paths() == []

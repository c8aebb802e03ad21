"""What SGLang's checksums tell of the precision in which a server holds its model."""

import json
import subprocess
import sys

import pytest

from megatron_a3po.cpu.rollout_server import server_environment
from tests.e2e.runs import ROOT, environment
from tests.support.deadlines import scaled
from tests.support.publishing import fleet_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

NAMES = """
import json, torch
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from sglang.srt.utils.weight_checker import WeightChecker, _build_check_entries, _build_quantized_set

def module(name, scale=None, method=None):
    built = torch.nn.Module()
    for each in [name, scale] if scale else [name]:
        built.register_parameter(each, torch.nn.Parameter(torch.zeros(1)))
    if method is not None:
        built.quant_method = object.__new__(method)
        built.quant_method.block_quant, built.quant_method.use_mxfp8 = True, False
    return built

def names(skipped, linear, experts):
    model = torch.nn.ModuleDict({"linear": linear, "experts": experts, "norm": module("weight")})
    checker = object.__new__(WeightChecker)
    checker._get_model = lambda: model
    state = dict(checker._model_state())
    entries = _build_check_entries(state, checker._skip_compare_names(skipped), _build_quantized_set(model))
    return [entry.name for entry in entries if entry.should_compare]

blocks = module("weight", "weight_scale_inv", Fp8LinearMethod), module("w2_weight", "w2_weight_scale_inv", Fp8MoEMethod)
plain = module("weight"), module("w2_weight")
one_scale = module("weight", "weight_scale"), module("w2_weight", "w2_weight_scale")
print(json.dumps([names(skipped, *model) for model in (blocks, plain, one_scale) for skipped in (None, ["weight"])]))
"""


def test_a_server_whose_folder_is_not_seen_here_shows_that_it_is_unquantised(server_url: str) -> None:
    with fleet_of(server_url) as fleet:
        (server,) = fleet.pool.membership.servers
        assert server.info is not None
        assert fleet.served_models == [(server_url, server.info.model_path, None)]
        server.info = server.info.model_copy(update={"model_path": "/nowhere"})
        assert fleet.served_models == [(server_url, "/nowhere", "unquant")]


def test_checksums_tell_of_no_scales_of_fp8_blocks_whose_weights_cannot_be_skipped() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NAMES],
        cwd=ROOT,
        env=environment() | server_environment(),
        capture_output=True,
        text=True,
        timeout=scaled(300),
    )
    assert done.returncode == 0, done.stderr
    blocks, kept_of_blocks, plain, kept_of_plain, one_scale, _ = json.loads(done.stdout.splitlines()[-1])
    assert blocks == plain == ["linear.weight", "experts.w2_weight", "norm.weight"]
    assert kept_of_blocks == ["linear.weight", "experts.w2_weight"] and kept_of_plain == []
    assert {"linear.weight_scale", "experts.w2_weight_scale"} < set(one_scale)

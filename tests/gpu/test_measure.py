"""The comparison of this folder on a CPU in bf16: what the GPU tests add is the device, its kernels, and NCCL."""

from pathlib import Path

import pytest

from megatron_a3po.preflight.check_layout import architecture_mistakes, rank_mistakes
from megatron_a3po.preflight.check_precision import precision_mistakes
from megatron_a3po.preflight.load import load_architecture
from tests.distributed.parity import Case, configuration
from tests.gpu import test_actor, test_four_gpus, test_two_gpus
from tests.gpu.environment import HAS_TRANSFORMER_ENGINE
from tests.gpu.limits import limits_of
from tests.gpu.measure import Results, make_case, run_cases
from tests.gpu.models import save_model

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(HAS_TRANSFORMER_ENGINE, reason="device: cpu is refused beside Transformer Engine"),
]

CASES: dict[str, Case] = {
    "TP2": make_case(device="cpu", parallel={"tensor": 2}, learning_rate=1e-2),
    "PP2": make_case(device="cpu", parallel={"pipeline": 2}, actor={"output_layer": "fused"}),
    "EP2": make_case("qwen3_moe_all", device="cpu", parallel={"expert": 2}),
    "EP2 routed": make_case("qwen3_moe", device="cpu", parallel={"expert": 2}),
}
STEPPING = "TP2"
"""Learns so fast that its second step is on other weights than Hugging Face's."""


@pytest.fixture(scope="module")
def results() -> Results:
    return run_cases(CASES, 2, "cpu", timeout_seconds=240)


@pytest.mark.parametrize("name", [name for name in CASES if name != STEPPING])
def test_the_actor_in_bf16_equals_hugging_face_in_float32_up_to_rounding(name: str, results: Results) -> None:
    limits_of(CASES[name].family, "bf16").check(results[name])
    assert results[name].logprob_mean > 1e-3, "float32 would be as near as 1e-6"
    assert results[name].num_microbatches >= 3


def test_limits_and_the_comparison_with_adam_notice_other_weights(results: Results) -> None:
    with pytest.raises(AssertionError):
        limits_of("qwen3", "fp8").check(results[STEPPING])
    assert results[STEPPING].adam == ["torch.optim.adamw.AdamW"]
    assert results[STEPPING].adam_difference <= 1e-6


def test_a_refused_case_is_known_with_its_reason() -> None:
    refused = run_cases({"fp8": make_case(device="cpu", precision="fp8")}, 1, "cpu", timeout_seconds=100)
    assert refused.failures["fp8"].startswith("ConfigError: precision: fp8") and not refused.launch_failure
    with pytest.raises(AssertionError, match="ConfigError"):
        refused["fp8"]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, test_actor.BF16 | test_actor.OTHERS | test_actor.FP8),
        (2, test_two_gpus.LAYOUTS | test_two_gpus.FP8),
        (4, test_four_gpus.LAYOUTS),
    ],
    ids=["one GPU", "two GPUs", "four GPUs"],
)
def test_every_case_for_gpus_passes_the_checks_of_its_configuration(
    world_size: int, cases: dict[str, Case], tmp_path: Path
) -> None:
    for family in {case.family for case in cases.values()}:
        save_model(family, tmp_path / family)
    for name, case in cases.items():
        config = configuration(case, tmp_path / case.family)
        assert config.device == "cuda"
        mistakes = [
            *precision_mistakes(config),
            *rank_mistakes(config, world_size),
            *architecture_mistakes(config, load_architecture(config.model)),
        ]
        assert not mistakes, name

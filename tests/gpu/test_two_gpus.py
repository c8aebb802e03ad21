"""The real actor on two GPUs: every parallel axis in bf16, and the FP8 recipes under tensor parallelism."""

import pytest

from megatron_a3po.actor.precision import FP8_RECIPES
from tests.distributed.parity import Case
from tests.gpu.environment import needs_gpus, recipe_runs
from tests.gpu.limits import limits_of
from tests.gpu.measure import Results, make_case, run_cases

pytestmark = needs_gpus(2)

LAYOUTS: dict[str, Case] = {
    "DP2": make_case(),
    "TP2": make_case(parallel={"tensor": 2}),
    "TP2 fused output layer": make_case(parallel={"tensor": 2}, actor={"output_layer": "fused"}),
    "PP2": make_case(parallel={"pipeline": 2}),
    "PP2 interleaved": make_case(parallel={"pipeline": 2, "virtual_pipeline": 2}),
    "CP2": make_case(parallel={"context": 2}),
    "EP2": make_case("qwen3_moe_all", parallel={"expert": 2}),
    "EP2 routed": make_case("qwen3_moe", parallel={"expert": 2}),
    "TP2 EP2": make_case("qwen3_moe_all", parallel={"tensor": 2, "expert": 2}),
}
FP8: dict[str, Case] = {
    f"TP2 {recipe}": make_case(precision="fp8", parallel={"tensor": 2}, fp8={"recipe": recipe})
    for recipe in FP8_RECIPES
}
FP8_HERE = {name: case for name, case in FP8.items() if recipe_runs(name.split()[1])}


@pytest.fixture(scope="module")
def in_bf16() -> Results:
    return run_cases(LAYOUTS, 2, "cuda", timeout_seconds=240)


@pytest.fixture(scope="module")
def in_fp8() -> Results:
    return run_cases(FP8_HERE, 2, "cuda", timeout_seconds=180)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_in_bf16_equals_hugging_face_in_float32_up_to_rounding(name: str, in_bf16: Results) -> None:
    limits_of(LAYOUTS[name].family, "bf16").check(in_bf16[name])


@pytest.mark.parametrize("name", FP8_HERE)
def test_an_fp8_recipe_of_this_device_trains_under_tensor_parallelism(name: str, in_fp8: Results) -> None:
    limits_of("qwen3", "fp8").check(in_fp8[name])

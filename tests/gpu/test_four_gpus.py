"""The real actor on four GPUs: parallel axes together, in bf16."""

import pytest

from tests.distributed.parity import Case
from tests.gpu.environment import needs_gpus
from tests.gpu.limits import limits_of
from tests.gpu.measure import Results, make_case, run_cases

pytestmark = needs_gpus(4)

LAYOUTS: dict[str, Case] = {
    "TP2 PP2": make_case(parallel={"tensor": 2, "pipeline": 2}),
    "TP2 CP2": make_case(parallel={"tensor": 2, "context": 2}),
    "TP2 PP2 EP2": make_case("qwen3_moe_all", parallel={"tensor": 2, "pipeline": 2, "expert": 2}),
}


@pytest.fixture(scope="module")
def results() -> Results:
    return run_cases(LAYOUTS, 4, "cuda", timeout_seconds=240)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_in_bf16_equals_hugging_face_in_float32_up_to_rounding(name: str, results: Results) -> None:
    limits_of(LAYOUTS[name].family, "bf16").check(results[name])

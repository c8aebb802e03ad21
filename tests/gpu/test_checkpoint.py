"""A checkpoint of what is on a GPU: saved while the run waits for it, and loaded into another actor."""

from pathlib import Path

import pytest

from tests.distributed.checkpoint_cases import STEPS_AFTER, run_cases
from tests.gpu.environment import needs_gpus, recipe_runs
from tests.gpu.measure import make_case

pytestmark = needs_gpus(1)

CASES = {
    "bf16": make_case(learning_rate=1e-3),
    "experts": make_case("qwen3_moe_all", learning_rate=1e-3),
    "optimizer in host memory": make_case(learning_rate=1e-3, optimizer={"offload": True}),
}
FP8 = {
    f"{family} {recipe}": make_case(family, learning_rate=1e-3, precision="fp8", fp8={"recipe": recipe})
    for family in ("qwen3", "qwen3_moe_all")
    for recipe in ("delayed", "blockwise")
}


@pytest.mark.parametrize("name", CASES | FP8)
def test_a_run_on_a_gpu_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    if name in FP8 and not recipe_runs(name.split()[1]):
        pytest.skip("this device, or its Transformer Engine, does not have the recipe")
    case = (CASES | FP8)[name]
    never_stopped, resumed = run_cases([case] * 2, tmp_path, world_size=1, device="cuda", timeout_seconds=280)

    assert resumed["altered"] == [], "weights, masters or moments came back otherwise"
    assert resumed["random"] == never_stopped["random"]
    assert len(resumed["metrics"]) == STEPS_AFTER
    # Kernels there may add up in another order at every run.
    assert resumed["metrics"][0] == pytest.approx(never_stopped["metrics"][0], rel=2e-2, abs=2e-3)

"""What `precision` means for Megatron, and FP8 that would silently be bf16 is refused with the remedy."""

import pytest
import torch

from megatron_a3po.actor.precision import FP8_RECIPES, model_precision, parameter_dtype, refuse_missing_fp8
from megatron_a3po.config import Fp8Config
from megatron_a3po.errors import ConfigError
from megatron_a3po.preflight.check_layout import FP8_MULTIPLES

AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER_BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
RUNS_ON = {
    "delayed": {ADA, HOPPER, BLACKWELL, CONSUMER_BLACKWELL},
    "tensorwise": {ADA, HOPPER, BLACKWELL, CONSUMER_BLACKWELL},
    "blockwise": {HOPPER},
    "mxfp8": {BLACKWELL, CONSUMER_BLACKWELL},
}
FIRST_TRANSFORMER_ENGINE = {"delayed": (1, 0), "tensorwise": (2, 2), "blockwise": (2, 3), "mxfp8": (2, 1)}
NEW_ENOUGH = (2, 20)


def fp8(recipe: str, **settings: object) -> Fp8Config:
    return Fp8Config.model_validate({"recipe": recipe, **settings})


def test_every_recipe_of_the_configuration_is_known_here_and_in_the_alignment_of_microbatches() -> None:
    choices = set(Fp8Config.model_json_schema()["properties"]["recipe"]["enum"])
    assert choices == FP8_RECIPES.keys() == FP8_MULTIPLES.keys() == RUNS_ON.keys()


@pytest.mark.parametrize("capability", [AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER_BLACKWELL])
@pytest.mark.parametrize("recipe", RUNS_ON)
def test_a_device_gets_the_recipes_that_it_computes_and_hears_which_those_are(
    recipe: str, capability: tuple[int, int]
) -> None:
    if capability in RUNS_ON[recipe]:
        refuse_missing_fp8(fp8(recipe), NEW_ENOUGH, capability)
        return
    with pytest.raises(ConfigError) as refused:
        refuse_missing_fp8(fp8(recipe), NEW_ENOUGH, capability)
    fact, remedy = str(refused.value).split(";")
    assert recipe in fact and f"{capability[0]}.{capability[1]}" in fact
    able = [name for name, devices in RUNS_ON.items() if capability in devices] or ["precision: bf16"]
    assert all(name in remedy for name in able)
    assert not [name for name in RUNS_ON if name not in able and name in remedy]


@pytest.mark.parametrize("recipe", RUNS_ON)
def test_a_transformer_engine_that_is_too_old_for_the_recipe_is_named_with_the_version_that_is_needed(
    recipe: str,
) -> None:
    device = min(RUNS_ON[recipe] & {HOPPER, BLACKWELL})
    first = FIRST_TRANSFORMER_ENGINE[recipe]
    for enough in (first, (2, 10), (3, 0)):  # compared as numbers
        refuse_missing_fp8(fp8(recipe), enough, device)
    before = (first[0], first[1] - 1) if first[1] else (first[0] - 1, 13)
    with pytest.raises(ConfigError) as refused:
        refuse_missing_fp8(fp8(recipe), before, device)
    for words in (f"fp8.recipe: {recipe}", f"{first[0]}.{first[1]}", f"{before[0]}.{before[1]}", "upgrade"):
        assert words in str(refused.value)


@pytest.mark.parametrize("recipe", RUNS_ON)
@pytest.mark.parametrize(
    ("installed", "capability", "missing"),
    [(None, HOPPER, "not installed"), (None, None, "not installed"), (NEW_ENOUGH, None, "no CUDA device")],
)
def test_fp8_without_transformer_engine_or_without_a_device_is_refused(
    recipe: str, installed: tuple[int, int] | None, capability: tuple[int, int] | None, missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"precision: fp8.*{missing}.*precision: bf16"):
        refuse_missing_fp8(fp8(recipe), installed, capability)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_without_fp8_its_section_changes_nothing(precision: str, dtype: torch.dtype) -> None:
    assert parameter_dtype(precision) is dtype  # type: ignore[arg-type]
    expected = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": precision == "bf16", "fp16": False}
    for section in (Fp8Config(), fp8("mxfp8", parameters=True, bf16_layers_at_end=1)):
        assert model_precision(precision, section) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RUNS_ON)
@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize(("start", "end"), [(0, 0), (1, 0), (0, 2)])
def test_fp8_settings_are_the_sections_own_beside_bf16(recipe: str, parameters: bool, start: int, end: int) -> None:
    section = fp8(recipe, parameters=parameters, bf16_layers_at_start=start, bf16_layers_at_end=end)
    settings = model_precision("fp8", section)
    assert settings.items() >= model_precision("bf16", section).items()
    assert parameter_dtype("fp8") is torch.bfloat16
    # Gradients need the range of e5m2 where one scale serves a whole tensor.
    assert settings["fp8"] == ("hybrid" if recipe in ("delayed", "tensorwise") else "e4m3")
    assert settings["fp8_recipe"] == recipe and settings["fp8_param"] is parameters
    assert settings["first_last_layers_bf16"] == (start + end > 0)
    assert (settings["num_layers_at_start_in_bf16"], settings["num_layers_at_end_in_bf16"]) == (start, end)

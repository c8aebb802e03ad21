"""Keys of the algorithm that do nothing are pointed out: those that change no loss, gradient or metric. No others."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_a3po.actor.fusions import Fusions
from megatron_a3po.actor.summary import startup_summary
from megatron_a3po.config import RunConfig
from megatron_a3po.errors import ConfigError
from megatron_a3po.preflight.check_algorithm import idle_keys
from megatron_a3po.preflight.describe import describe_run
from megatron_a3po.preflight.load import load_architecture, load_config
from tests.support.objective_run import METHODS, Result, batch, objective, run
from tests.unit.config.test_config import file, model

__all__ = ["file", "model"]

OTHER_VALUES: dict[str, Any] = {
    "behaviour_weight": 0.3,
    "fresh_anchor": "behaviour",
    "clip_epsilon_low": 0.05,
    "clip_epsilon_high": 0.05,
    "dual_clip": 1.01,
    "compare_with_recompute": True,
    "ratio_level": "sequence",
    "weight_cap": 1.2,
    "weight_cap_mode": "clamp",
    "weight_cap_level": "sequence",
    "entropy_coefficient": 0.1,
    "kl_coefficient": 0.1,
    "kl_estimator": "k1",
}


def configuration(proximal: str, **algorithm: Any) -> RunConfig:
    described = {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"task": "t"}, "proximal": proximal}
    return RunConfig.model_validate(described | {"algorithm": algorithm})


def outcome(proximal: str, algorithm: dict[str, Any]) -> Result:
    return run(objective(proximal, **algorithm), *batch())


@pytest.mark.parametrize("key", OTHER_VALUES)
@pytest.mark.parametrize(
    "others", [{"weight_cap": 1.1}, {"weight_cap": None}, {"weight_cap": 1.1, "kl_coefficient": 0.2}], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_a_key_is_noted_exactly_where_another_value_changes_nothing(
    method: str, others: dict[str, Any], key: str
) -> None:
    changed = others | {key: OTHER_VALUES[key]}
    before, after = outcome(method, others), outcome(method, changed)
    same = (
        torch.equal(before.loss, after.loss)
        and torch.equal(before.on_logprobs, after.on_logprobs)
        and (before.on_entropy is None) == (after.on_entropy is None)
        and before.metrics == after.metrics
    )
    noted = [note for note in idle_keys(configuration(method, **changed)) if f"algorithm.{key} = " in note]
    assert len(noted) == same


@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_not_noted(method: str) -> None:
    assert list(idle_keys(configuration(method))) == []


def test_a_recipe_whose_method_the_command_line_replaces_still_runs_and_says_what_does_nothing_now(
    file: Path,
) -> None:
    more = "  behaviour_weight: 0.5\n  clip_epsilon_high: 0.28\n  weight_cap_mode: clamp\n  kl_estimator: k1\n"
    file.write_text(f"{file.read_text()}algorithm:\n{more}")
    as_it_is = load_config(file, ["algorithm.kl_coefficient=0.1"], {})
    replaced = load_config(file, ["proximal=reuse_target", "algorithm.weight_cap=null"], {})
    architecture = load_architecture(as_it_is.model)
    fusions = Fusions(transformer_engine=None, optimizer="torch AdamW", gradient_accumulation=False)

    assert list(idle_keys(as_it_is)) == []
    for lines in (
        describe_run(replaced, architecture, 1),
        startup_summary(replaced, architecture, fusions, world_size=1),
    ):
        noted = [re.search(r"^note: algorithm\.(\w+) = .* `([\w.]+): (\w+)`$", line) for line in lines]
        assert [match.groups() for match in noted if match] == [
            ("behaviour_weight", "proximal", "reuse_target"),
            ("clip_epsilon_high", "proximal", "reuse_target"),
            ("weight_cap_mode", "algorithm.weight_cap", "null"),
            ("kl_estimator", "algorithm.kl_coefficient", "0"),
        ]


@pytest.mark.parametrize("temperature", [5e-7, 9.9e-7, 1e-6, 0.6])
def test_a_temperature_is_refused_exactly_where_sglang_samples_greedily_instead(temperature: float, file: Path) -> None:
    package = find_spec("sglang")
    assert package is not None and package.origin is not None
    source = (Path(package.origin).parent / "srt" / "sampling" / "sampling_params.py").read_text(encoding="utf-8")
    (bound,) = re.findall(r"^_SAMPLING_EPS = (.+)$", source, re.MULTILINE)
    assert "if 0 <= self.temperature < _SAMPLING_EPS:" in source

    if temperature >= float(bound):
        assert load_config(file, [f"rollout.temperature={temperature}"], {}).rollout.temperature == temperature
    else:
        with pytest.raises(ConfigError, match=r"1\. rollout\.temperature = .*; use 1, or at least 1e-06"):
            load_config(file, [f"rollout.temperature={temperature}"], {})

"""What docs/data_and_rewards.md says is so."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_a3po.algorithm.accuracy import confidence_interval
from megatron_a3po.config import DataConfig, EvaluationConfig, EvaluationDataset, RewardConfig, RunConfig
from megatron_a3po.config.yaml_files import read_yaml
from megatron_a3po.prompts.rows import SCHEMAS, BadRow
from megatron_a3po.rewards import math_grader as answers
from megatron_a3po.rewards.scorers import ScorerSpec
from megatron_a3po.rewards.types import FailureKind, Sample
from megatron_a3po.rewards.worker_pool import RewardWorkers, WorkerSettings
from tests.support.pages import blocks, prose
from tests.support.paths import ROOT

PAGE = "docs/data_and_rewards.md"
PROSE = prose(PAGE)


def test_the_settings_are_valid(tmp_path: Path) -> None:
    mine, of_data, of_evaluation = blocks(PAGE, "yaml")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my.yaml").write_text(mine, encoding="utf-8")
    values, mistakes = read_yaml(tmp_path / "my.yaml")
    config = RunConfig.model_validate(values)
    assert mistakes == [] and (config.data.path, config.data.task) == (Path("my.jsonl"), None)
    assert (config.device, config.parallel.tensor, config.num_steps) == ("cpu", 2, 20)
    data = DataConfig(**yaml.safe_load(of_data)["data"])
    assert data.columns == {"prompt": "problem", "answer": "solution", "id": "meta.uid", "level": "meta.level"}
    evaluation = EvaluationConfig(**yaml.safe_load(of_evaluation)["evaluation"])
    assert list(evaluation.datasets) == ["aime24", "math500"] and evaluation.num_samples == 8
    assert evaluation.datasets["aime24"].instruction == r"Put the answer in \boxed{}."


def test_the_interval_that_it_gives_is_that_of_thirty_prompts_half_of_them_right() -> None:
    low, high = confidence_interval([1.0] * 15 + [0.0] * 15)
    assert f"{low:.2f} to {high:.2f}" in PROSE


def test_the_dataset_snippet_runs() -> None:
    exec(blocks(PAGE, "python")[0], {})


def test_the_reward_functions_run_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(blocks(PAGE, "python")[1], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    values: dict[str, Any] = {"prompt_id": "p", "prompt": "6 * 7?", "answer": 42, "row": {}}
    group = [
        Sample(response="It is 42", num_tokens=3, truncated=False, **values),
        Sample(response="It is 41", num_tokens=4, truncated=False, **values),
        Sample(response="Well, let me see: 42", num_tokens=9, truncated=True, **values),
    ]

    async def score(name: str) -> list[tuple[float, str]]:
        spec = ScorerSpec(scorer=f"my_rewards:{name}")
        limits: dict[str, Any] = {"max_workers": 1, "timeout_seconds": 60.0, "memory_bytes": None}
        pool = RewardWorkers(WorkerSettings(spec=spec, log_file=tmp_path / "log", **limits))
        pool.start()
        try:
            (outcome,) = await pool.score([group])
        finally:
            await pool.close()
        assert isinstance(outcome, list), outcome
        return [(item.value, item.reason) for item in outcome]

    assert asyncio.run(score("has_answer")) == [(1.0, "right"), (0.0, "wrong"), (0.0, "truncated")]
    assert asyncio.run(score("shortest")) == [(1.0, ""), (0.0, ""), (0.0, "")]


def test_every_schema_reason_and_key_that_it_names_is_there_and_none_is_missing() -> None:
    names = set(re.findall(r"`([a-z_0-9/.]+)`", PROSE))
    assert {f"{name}" for name in SCHEMAS} <= names
    assert {str(reason) for reason in BadRow} <= names
    assert {answers.RIGHT, answers.WRONG, answers.NO_ANSWER, answers.TOO_LONG, answers.UNDECIDED} <= names
    assert {str(kind) for kind in FailureKind} <= {name.removeprefix("dropped/") for name in names}
    sections = (DataConfig, RewardConfig, EvaluationConfig, EvaluationDataset)
    keys = {key for section in sections for key in section.model_fields}
    code = [*re.findall(r"`([^`]+)`", PROSE), *blocks(PAGE, "yaml")]
    assert keys - {word for text in code for word in re.findall(r"\w+", text)} == set()

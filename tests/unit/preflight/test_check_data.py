"""Mistakes in the options of prompts and rewards: found before anything starts, with key, value and remedy."""

from pathlib import Path
from typing import Any

import pytest

from megatron_a3po.config import DataConfig, EvaluationConfig, RewardConfig, RolloutConfig, RunConfig
from megatron_a3po.config.mistakes import Mistake
from megatron_a3po.preflight.check_data import data_mistakes
from tests.support.mistakes import assert_named


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "test.parquet", "words.txt"):
        (tmp_path / name).touch()
    (tmp_path / "saved").mkdir()
    return tmp_path


def found(data: dict[str, Any], reward: dict[str, Any] | None = None, **evaluation: Any) -> list[Mistake]:
    return list(data_mistakes(config(data, reward or {}, **evaluation)))


def config(data: dict[str, Any], reward: dict[str, Any], **evaluation: Any) -> RunConfig:
    sections: dict[str, Any] = {"data": DataConfig(**data), "reward": RewardConfig(**reward)}
    sections["evaluation"] = EvaluationConfig(**evaluation)
    rollout = RolloutConfig(max_new_tokens=50)
    return RunConfig(model=Path("m"), run_dir=Path("r"), num_steps=1, rollout=rollout, **sections)


TASK = {"task": "spell_backward"}
FILE: dict[str, Any] = {"path": Path("train.jsonl")}


@pytest.mark.parametrize(
    ("data", "reward"),
    [
        (TASK, {}),
        (TASK | {"size": 10, "prompt_pattern": "x"}, {"scorer": "task"}),
        (FILE, {}),
        (FILE | {"columns": "gsm8k"}, {"scorer": "math_exact"}),
        (FILE | {"columns": {"prompt": "q"}}, {"scorer": "tests.support.reward_functions:length"}),
        (FILE | {"columns": {"prompt": "q"}}, {"scorer": "http://judge:8000/score"}),
        ({"path": Path("saved"), "split": "train"}, {}),
        (FILE, {"format_pattern": "<think>.*</think>", "format_penalty": 0.5, "length_penalty": 0.1}),
    ],
)
def test_these_are_right(folder: Path, data: dict[str, Any], reward: dict[str, Any]) -> None:
    assert found(data, reward) == []


@pytest.mark.parametrize(
    ("data", "reward", "expected"),
    [
        ({}, {}, "data; `data.task`"),
        (TASK | FILE, {}, "data.path = 'train.jsonl': data.task; remove one of them"),
        (TASK | {"split": "train"}, {}, "data.split = 'train': `data.path`; remove this key"),
        (FILE | {"size": 10}, {}, "data.size = 10: `data.task`; remove this key"),
        ({"path": Path("no.jsonl")}, {}, "data.path = 'no.jsonl'; check the path"),
        ({"path": Path("words.txt")}, {}, "data.path = 'words.txt'; convert it"),
        (FILE | {"columns": {"answer": "a"}}, {}, "data.columns = {'answer': 'a'}; `prompt: COLUMN`"),
        (FILE | {"columns": {"prompt": "q"}}, {}, "data.columns = {'prompt': 'q'}; `answer: COLUMN`"),
        (
            TASK | {"chat_template": False, "enable_thinking": True},
            {},
            "data.enable_thinking = True; data.chat_template = False",
        ),
        (FILE, {"scorer": "task"}, "reward.scorer = 'task': `data.task`; use `math`"),
        (FILE, {"scorer": "mth"}, "reward.scorer = 'mth'; `math`?"),
        (FILE, {"scorer": "llm judge"}, "reward.scorer = 'llm judge'; use auto, task, math, math_exact, mod"),
        (FILE, {"scorer": "http:///score"}, "reward.scorer = 'http:///score'; http://host:port"),
        (FILE, {"format_pattern": "(", "format_penalty": 1}, "reward.format_pattern = '('; correct it"),
        (FILE, {"format_pattern": "x"}, "reward.format_pattern = 'x'; set `reward.format_penalty`"),
        (FILE, {"format_penalty": 1}, "reward.format_penalty = 1.0; set `reward.format_pattern`"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(
    folder: Path, data: dict[str, Any], reward: dict[str, Any], expected: str
) -> None:
    assert_named(found(data, reward), expected)


def test_evaluation_datasets_that_are_right(folder: Path) -> None:
    test = {"path": Path("test.parquet"), "columns": "dapo_math", "num_prompts": 5, "instruction": "Box it."}
    assert found(FILE, num_samples=8, temperature=0.7, datasets={"aime-24.1": test}) == []
    assert found(FILE | {"num_held_out": 0}, temperature=0, datasets={"test": {"path": Path("test.parquet")}}) == []
    assert found(TASK, {"scorer": "math"}, datasets={"test": {"path": Path("test.parquet")}}) == []


@pytest.mark.parametrize(
    ("data", "evaluation", "expected"),
    [
        (FILE | {"num_held_out": 0}, {}, "data.num_held_out = 0; `evaluation.datasets`"),
        (
            FILE,
            {"datasets": {"a": {"path": Path("no.jsonl")}}},
            "evaluation.datasets.a.path = 'no.jsonl'; check the path",
        ),
        (
            FILE,
            {"datasets": {"held_out": {"path": Path("train.jsonl")}}},
            "evaluation.datasets.held_out = 'held_out'; another name",
        ),
        (FILE, {"datasets": {"a/b": {"path": Path("train.jsonl")}}}, "evaluation.datasets.a/b = 'a/b'; another name"),
        (
            FILE,
            {"datasets": {"a": {"path": Path("train.jsonl"), "columns": {"prompt": "q"}}}},
            "evaluation.datasets.a.columns = {'prompt': 'q'}; `answer: COLUMN`",
        ),
        (
            TASK,
            {"datasets": {"a": {"path": Path("train.jsonl")}}},
            "reward.scorer = 'auto': `evaluation.datasets`; use `math`",
        ),
        (FILE, {"temperature": 0, "num_samples": 4}, "evaluation.num_samples = 4: evaluation.temperature = 0; use 1"),
    ],
)
def test_mistakes_of_evaluations_are_named_with_their_remedy(
    folder: Path, data: dict[str, Any], evaluation: dict[str, Any], expected: str
) -> None:
    assert_named(found(data, **evaluation), expected)

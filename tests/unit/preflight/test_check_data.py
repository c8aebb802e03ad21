"""Mistakes in the options of prompts and rewards: found before anything starts, with key, value and remedy."""

from pathlib import Path
from typing import Any

import pytest

from megatron_a3po.config import DataConfig, EvaluationConfig, RewardConfig, RolloutConfig, RunConfig
from megatron_a3po.preflight.check_data import data_mistakes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "test.parquet", "words.txt"):
        (tmp_path / name).touch()
    (tmp_path / "saved").mkdir()
    return tmp_path


def found(data: dict[str, Any], reward: dict[str, Any] | None = None, **evaluation: Any) -> list[str]:
    return [str(mistake) for mistake in data_mistakes(config(data, reward or {}, **evaluation))]


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
    ("data", "reward", "message"),
    [
        ({}, {}, "data: there are no prompts; give `data.task: NAME`"),
        (TASK | FILE, {}, "data.path = 'train.jsonl': there is data.task as well; remove one of them"),
        (TASK | {"split": "train"}, {}, "data.split = 'train': does nothing without `data.path`; remove this key"),
        (FILE | {"size": 10}, {}, "data.size = 10: does nothing without `data.task`; remove this key"),
        ({"path": Path("no.jsonl")}, {}, "data.path = 'no.jsonl': there is no such file or folder"),
        ({"path": Path("words.txt")}, {}, "data.path = 'words.txt': neither .jsonl nor .parquet; convert it"),
        (FILE | {"columns": {"answer": "a"}}, {}, "no column is the prompt; add `prompt: COLUMN`"),
        (FILE | {"columns": {"prompt": "q"}}, {}, "no column is the answer that reward.scorer = auto compares with"),
        (
            TASK | {"chat_template": False, "enable_thinking": True},
            {},
            "data.enable_thinking = True: needs the chat template; remove this key, or `data.chat_template: false`",
        ),
        (FILE, {"scorer": "task"}, "reward.scorer = 'task': only prompts of `data.task` have a scorer of their own"),
        (FILE, {"scorer": "mth"}, "reward.scorer = 'mth': unknown; did you mean `math`?"),
        (FILE, {"scorer": "llm judge"}, "reward.scorer = 'llm judge': unknown; use auto, task, math, math_exact, mod"),
        (FILE, {"scorer": "http:///score"}, "reward.scorer = 'http:///score': not a URL; write http://host:port"),
        (FILE, {"format_pattern": "(", "format_penalty": 1}, "reward.format_pattern = '(': not a regular expression"),
        (FILE, {"format_pattern": "x"}, "reward.format_pattern = 'x': costs nothing; set `reward.format_penalty`"),
        (FILE, {"format_penalty": 1}, "reward.format_penalty = 1.0: there is no format; give `reward.format_pattern`"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(
    folder: Path, data: dict[str, Any], reward: dict[str, Any], message: str
) -> None:
    (mistake,) = found(data, reward)
    assert message in mistake


def test_evaluation_datasets_that_are_right(folder: Path) -> None:
    test = {"path": Path("test.parquet"), "columns": "dapo_math", "num_prompts": 5, "instruction": "Box it."}
    assert found(FILE, num_samples=8, temperature=0.7, datasets={"aime-24.1": test}) == []
    assert found(FILE | {"num_held_out": 0}, temperature=0, datasets={"test": {"path": Path("test.parquet")}}) == []
    assert found(TASK, {"scorer": "math"}, datasets={"test": {"path": Path("test.parquet")}}) == []


@pytest.mark.parametrize(
    ("data", "evaluation", "message"),
    [
        (FILE | {"num_held_out": 0}, {}, "data.num_held_out = 0: nothing would be evaluated; keep some prompts, or"),
        (
            FILE,
            {"datasets": {"a": {"path": Path("no.jsonl")}}},
            "evaluation.datasets.a.path = 'no.jsonl': there is no such file or folder",
        ),
        (
            FILE,
            {"datasets": {"held_out": {"path": Path("train.jsonl")}}},
            "evaluation.datasets.held_out = 'held_out': held-out prompts have this name; name it otherwise",
        ),
        (
            FILE,
            {"datasets": {"a/b": {"path": Path("train.jsonl")}}},
            "no name for files and metrics; name it otherwise",
        ),
        (
            FILE,
            {"datasets": {"a": {"path": Path("train.jsonl"), "columns": {"prompt": "q"}}}},
            "evaluation.datasets.a.columns = {'prompt': 'q'}: no column is the answer",
        ),
        (
            TASK,
            {"datasets": {"a": {"path": Path("train.jsonl")}}},
            "reward.scorer = 'auto': a task's scorer knows no answers of `evaluation.datasets`; use `math`",
        ),
        (FILE, {"temperature": 0, "num_samples": 4}, "evaluation.num_samples = 4: with evaluation.temperature = 0 all"),
    ],
)
def test_mistakes_of_evaluations_are_named_with_their_remedy(
    folder: Path, data: dict[str, Any], evaluation: dict[str, Any], message: str
) -> None:
    (mistake,) = found(data, **evaluation)
    assert message in mistake

"""Which prompts a run takes, by the lengths that the tokenizer itself tells."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from megatron_a3po.config import DataConfig, EvaluationConfig, RolloutConfig, RunConfig
from megatron_a3po.errors import DataError
from megatron_a3po.prompts.load import load_prompts, longest_request
from megatron_a3po.prompts.prompts import PromptSet
from tests.support.scripted_rollouts import describe_model

POSITIONS, KEPT_BACK = 512, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return describe_model(tmp_path_factory.mktemp("model"))


def load(model: Path, tmp_path: Path, evaluated_tokens: int | None) -> PromptSet:
    config = config_of(model, tmp_path, evaluated_tokens)
    config.run_dir.mkdir(exist_ok=True)
    return load_prompts(config, tokenizer_of(model), config.run_dir)


def tokenizer_of(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def config_of(model: Path, tmp_path: Path, evaluated_tokens: int | None) -> RunConfig:
    """Twelve prompts of different lengths, all but one of which are held out, and a dataset of twelve more."""
    for name in ("train", "other"):
        rows = [{"q": " ".join(["seven"] * number + [name]), "a": "7"} for number in range(1, 13)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    columns = {"prompt": "q", "answer": "a"}
    return RunConfig(
        model=model,
        run_dir=tmp_path / "run",
        num_steps=1,
        data=DataConfig(
            path=tmp_path / "train.jsonl", columns=columns, num_held_out=11, chat_template=False, instruction=""
        ),
        rollout=RolloutConfig(max_new_tokens=8),
        evaluation=EvaluationConfig.model_validate(
            {"max_new_tokens": evaluated_tokens, "datasets": {"other": {"path": tmp_path / "other.jsonl"}}}
        ),
    )


def test_evaluations_take_the_prompts_that_leave_room_for_their_own_longer_responses(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron_a3po"), "propagate", True)
    tokenizer = tokenizer_of(model)
    every = load(model, tmp_path, None)
    assert {name: len(prompts) for name, prompts in every.evaluation.items()} == {"held_out": 11, "other": 12}
    longest = len(tokenizer(" ".join(["seven"] * 6 + ["other"]))["input_ids"])

    some = load(model, tmp_path, POSITIONS - KEPT_BACK - longest)

    assert len(some) == len(every) == 1
    assert longest_request(config_of(model, tmp_path, POSITIONS - KEPT_BACK - longest), some) == POSITIONS - KEPT_BACK
    assert some.max_tokens >= len(some.training_prompt(0).token_ids)
    assert longest_request(config_of(model, tmp_path, None), some) == max(
        some.max_tokens + 8, *(len(each.token_ids) + 8 for prompts in some.evaluation.values() for each in prompts)
    )
    for name, prompts in every.evaluation.items():
        fitting = [each for each in prompts if len(tokenizer(each.question)["input_ids"]) <= longest]
        assert 0 < len(fitting) < len(prompts) and some.evaluation[name] == fitting
        assert f"{len(prompts) - len(fitting)} of {len(prompts)} prompts of the evaluation {name} leave" in caplog.text


def test_an_evaluation_without_a_prompt_that_leaves_room_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"held_out .*evaluation\.max_new_tokens = \d+"):
        load(model, tmp_path, POSITIONS - KEPT_BACK)

"""The command line: what it takes, and what it refuses before anything starts."""

import json
from pathlib import Path

import pytest

from megatron_a3po.__main__ import main
from megatron_a3po.config import RunConfig
from megatron_a3po.errors import ConfigError
from megatron_a3po.evaluate import evaluate
from tests.support.paths import ROOT
from tests.support.tiny_models import save_tiny_model
from tests.unit.project.test_recipes import checkout as checkout
from tests.unit.project.test_recipes import readable as readable

PLAN = ["plan", "--config", str(ROOT / "configs" / "qwen3_8b_dapo_math.yaml")]


def test_overrides_may_stand_on_both_sides_of_an_option(readable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "num_steps=70", "--ranks", "4", "rollout.group_size=4"]) == 0
    output = capsys.readouterr().out
    assert "run: 70 steps" in output and "128 prompts x 4 responses" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PLAN, "--ranks", "0"], "--ranks: 0"),
        ([*PLAN, "--ranks", "-4"], "--ranks: -4"),
        ([*PLAN, "--ranks", "4", "--rank", "3", "--no-such"], "unrecognized arguments: --no-such"),
        (["evaluate", "--config", "f", "--name", "a/../b"], "--name: 'a/../b'"),
        (["evaluate", "--config", "f", "--name", ".."], "--name: '..'"),
        (["report", "folder", "seed=1"], "unrecognized arguments: seed=1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_an_evaluation_is_not_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "evaluations" / "step_00000020"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({}))
    config = RunConfig.model_validate(
        {"model": tmp_path, "run_dir": tmp_path / "run", "num_steps": 1, "data": {"task": "spell_backward"}}
    )
    with pytest.raises(ConfigError, match="step_00000020"):
        evaluate(config, "step_00000020")


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_reward_function_that_is_not_there_leaves_no_run_folder(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mistake is mended and the same command given again: the folder must not hold the wrong configuration."""
    save_tiny_model("qwen3", tmp_path / "model")
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    config = [f"model={tmp_path / 'model'}", f"run_dir={tmp_path / 'run'}", "parallel.tensor=1", "parallel.pipeline=1"]
    config += ["reward.scorer=tests.support.reward_functions:lenght"]
    assert main([command, "--config", str(ROOT / "configs" / "tiny_cpu.yaml"), *config]) == 2
    error = capsys.readouterr().err
    assert "reward.scorer" in error and "length" in error
    assert not (tmp_path / "run").exists()

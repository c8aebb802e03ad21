"""`python -m megatron_a3po evaluate`: a model's own server against Hugging Face, and a server that runs already."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import get, run_to_end

pytestmark = pytest.mark.e2e

NUM_PROMPTS = 48


def evaluate(run_dir: Path, model: Path, *overrides: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "megatron_a3po", "evaluate", "--config", "configs/tiny_cpu.yaml", "--name", "here"]
    command += [f"run_dir={run_dir}", f"model={model}", f"data.num_held_out={NUM_PROMPTS}", *overrides]
    return run_to_end(command, run_dir.parent / "output.log", 240)


def records(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "evaluations" / "here" / "samples.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_greedy_responses_of_a_model_folder_are_those_of_hugging_face(model: Path, tmp_path: Path) -> None:
    code, output = evaluate(tmp_path / "run", model, "evaluation.temperature=0")
    assert code == 0, output

    hugging_face = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = records(tmp_path / "run")
    assert len(found) == NUM_PROMPTS and {tuple(record["weight_versions"]) for record in found} == {(0,)}
    right = 0
    for record in found:
        ids = torch.tensor([tokenizer.encode(record["question"], add_special_tokens=False)])
        with torch.no_grad():
            answer = hugging_face.generate(ids, do_sample=False, max_new_tokens=7, attention_mask=torch.ones_like(ids))
        text = tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
        assert record["response"] == text
        right += record["reward"]
        assert record["reward"] == float(text.strip() == record["answer"])
    assert 0 < right < NUM_PROMPTS and f"held_out: avg@1 {right / NUM_PROMPTS:.3f} (" in output


def test_what_a_running_server_holds_is_evaluated_and_left_there(server_url: str, model: Path, tmp_path: Path) -> None:
    before = json.loads(get(f"{server_url}/model_info")[1])["weight_version"]
    overrides = [f"rollout.servers=[{server_url}]", "evaluation.num_samples=4"]
    code, output = evaluate(tmp_path / "run", model, *overrides)
    assert code == 0, output
    found = records(tmp_path / "run")
    version = int(before.split()[0]) if before != "default" else 0
    assert len(found) == 4 * NUM_PROMPTS and {tuple(record["weight_versions"]) for record in found} == {(version,)}
    evaluated = f"version {before}" if version > 0 else str(model)
    assert f"evaluating {evaluated}\n" in output and "pass@4" in output
    summary = json.loads((tmp_path / "run" / "evaluations" / "here" / "summary.json").read_text())
    assert summary["evaluated"] == evaluated


def test_a_megatron_folder_is_no_model_for_a_server(model: Path, tmp_path: Path) -> None:
    (tmp_path / "megatron" / "weights").mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix == ".json":
            (tmp_path / "megatron" / file.name).write_bytes(file.read_bytes())
    for name in (".metadata", "manifest.json"):
        (tmp_path / "megatron" / "weights" / name).touch()
    code, output = evaluate(tmp_path / "run", tmp_path / "megatron")
    assert code == 2 and "servers read no Megatron folders" in output, output

"""Whole runs: four Megatron ranks under torchrun and a real SGLang server."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import get, metrics, post, run_to_end, torchrun, train_in_forks
from tests.support.documented_metrics import undocumented

pytestmark = pytest.mark.e2e

NUM_STEPS = 2
GROUPS = 8
SMALL = [f"num_steps={NUM_STEPS}", f"rollout.prompts_per_step={GROUPS}", "data.num_held_out=32"]


@pytest.mark.parametrize(("ranks", "max_staleness", "proximal"), [(4, 2, "loglinear"), (2, 0, "recompute")])
def test_a_run_publishes_every_version_and_explains_itself(
    server_url: str, model: Path, tmp_path: Path, ranks: int, max_staleness: int, proximal: str
) -> None:
    run_dir = tmp_path / "run"
    overrides = [f"model={model}", f"run_dir={run_dir}", f"rollout.servers=[{server_url}]", *SMALL]
    overrides += [f"max_staleness={max_staleness}", f"proximal={proximal}", f"parallel.pipeline={ranks // 2}"]

    if ranks == 4:
        code, output = run_to_end(torchrun(*overrides), tmp_path / "output.log", timeout_seconds=240)
    else:
        code, output = train_in_forks(*overrides, ranks=ranks, log=tmp_path / "output.log", timeout_seconds=240)

    assert code == 0, output
    rows, summary = metrics(run_dir), json.loads((run_dir / "summary.json").read_text())
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["weight_version"] for row in rows[1:]] == [1, 2]
    assert all(row["logprob_difference_max"] <= 1e-5 for row in rows), "also after publishing version 0"
    assert all(row["loss_tokens"] > 0 and row["gradient_norm"] > 0 for row in rows[1:])
    assert all(row["staleness_max"] <= max_staleness for row in rows[1:])

    assert summary["num_steps"] == NUM_STEPS
    assert 0 < summary["max_abs_logprob_difference"] <= 1e-5
    assert summary["max_staleness_seen"] <= max_staleness
    assert 0 <= summary["eval_accuracy_before"] <= 1
    assert 0 <= summary["eval_accuracy_after"] <= 1
    ledger = summary["ledger"]
    assert ledger["issued"] == ledger["consumed"] == NUM_STEPS * GROUPS
    assert ledger["dropped"] == ledger["in_flight"] == ledger["buffered"] == 0
    if max_staleness == 0:
        assert all(row["fresh_tokens"] == row["loss_tokens"] for row in rows[1:])
        assert all(row["fresh_logprob_difference_max"] <= 1e-5 for row in rows[1:])

    for name in ("report.html", "summary.json", "metrics.jsonl", "model", "tensorboard", "logs"):
        assert (run_dir / name).exists()
        assert str(run_dir / name) in output
    assert (run_dir / "config.resolved.yaml").exists()
    assert undocumented(rows) == set()
    _assert_the_saved_model_is_what_the_server_computes_with(run_dir / "model", server_url)
    noise = ("Traceback", "Warning", "INFO:", "deprecated")
    lines_of_the_run = output[output.index(f"building {ranks} actors") :]
    assert not any(word in lines_of_the_run for word in noise), output


def _assert_the_saved_model_is_what_the_server_computes_with(folder: Path, server_url: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(folder).encode("Spell this word backward (example: sun -> nus): carpet")
    request = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 7}, "return_logprob": True}
    answer = post(f"{server_url}/generate", request)
    ids = torch.tensor([*prompt, *answer["output_ids"]])
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    ours = logprobs.gather(-1, ids[len(prompt) :, None])[:, 0]
    theirs = torch.tensor([triple[0] for triple in answer["meta_info"]["output_token_logprobs"]])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_server_given_by_its_address_is_left_ready_with_the_last_version(server_url: str) -> None:
    """Runs after the trainings above, on the same server."""
    assert get(f"{server_url}/ready")[0] == 200
    answer = post(f"{server_url}/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}})
    # The label also tells which run has published it.
    assert answer["meta_info"]["weight_versions"][0]["version"].split(" of ")[0] == str(NUM_STEPS)


def test_one_message_lists_all_mistakes_before_anything_starts(tmp_path: Path, model: Path) -> None:
    run_dir = tmp_path / "run"
    overrides = [f"model={model}", f"run_dir={run_dir}", "rollout.group_sise=4", "num_steps=many"]

    code, output = run_to_end(torchrun(*overrides, ranks=3), tmp_path / "output.log", timeout_seconds=60)

    assert code != 0
    assert output.count("mistakes in the configuration") == 1
    assert "rollout.group_sise" in output
    assert "did you mean `rollout.group_size`" in output
    assert "num_steps" in output
    assert "and there are 3" in output
    assert not run_dir.exists()


def test_a_folder_that_holds_a_run_is_not_used_again(tmp_path: Path, model: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.resolved.yaml").write_text("of another run\n")

    code, output = run_to_end(
        torchrun(f"model={model}", f"run_dir={run_dir}", "resume=none"), tmp_path / "output.log", timeout_seconds=60
    )

    assert code != 0
    assert "there is a run in this folder" in output
    assert (run_dir / "config.resolved.yaml").read_text() == "of another run\n"

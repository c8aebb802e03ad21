"""A run from Megatron weights to Hugging Face folders, and its checkpoints as such, by the commands that users type."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import metrics, run_to_end, train_in_forks
from tools.benchmark_conversion import run_tool, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_run_starts_from_megatrons_weights_and_its_exports_and_checkpoints_are_its_policy(
    model: Path, tmp_path: Path
) -> None:
    """The server starts without weights of its own, which the first publication brings."""
    start, run = tmp_path / "megatron", tmp_path / "run"
    to_megatron = [sys.executable, "tools/convert_hf_to_megatron.py", str(model), str(start), "--verify"]
    code, output = run_to_end(to_megatron, tmp_path / "to_megatron.log", 240.0)
    assert code == 0, output
    assert "tensors are equal bit by bit" in output and "random tokens: they differ by at most" in output

    overrides = [f"model={start}", f"run_dir={run}", "num_steps=3", "rollout.prompts_per_step=8"]
    overrides += ["data.num_held_out=32", "checkpoint.export_every_steps=2", "checkpoint.every_steps=2"]
    code, output = train_in_forks(*overrides, ranks=4, log=tmp_path / "run.log", timeout_seconds=300.0)
    assert code == 0, output
    assert max(row["logprob_difference_max"] for row in metrics(run)) <= 1e-5
    assert [path.name for path in (run / "exports").iterdir()] == ["step_00000002"]

    checkpoint, back = run / "checkpoints" / "step_00000002", tmp_path / "step2"
    to_hf = [sys.executable, "tools/convert_megatron_to_hf.py", str(checkpoint), str(back), "--verify"]
    code, output = run_to_end(to_hf, tmp_path / "to_hf.log", 240.0)
    assert code == 0, output
    converted, exported, final = (
        load_file(folder / "model.safetensors") for folder in (back, run / "exports" / "step_00000002", run / "model")
    )
    assert converted.keys() == exported.keys() == final.keys()
    assert all(torch.equal(converted[name], exported[name]) for name in converted)
    assert any(not torch.equal(final[name], exported[name]) for name in final)
    for folder in (back, run / "exports" / "step_00000002", run / "model"):
        loaded, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert len(tokenizer("spell").input_ids) > 0 and loaded.generation_config is not None
        assert (folder / "generation_config.json").exists()


@pytest.mark.nightly
def test_the_memory_of_a_conversion_does_not_grow_with_the_model(tmp_path: Path) -> None:
    peaks: dict[str, list[float]] = {}
    for layers in (1, 8):
        folders = [tmp_path / f"{kind}{layers}" for kind in ("hf", "megatron", "back")]
        num_parameters = write_model(folders[0], layers, vocabulary=8192)
        for tool, source, target in zip(
            ("convert_hf_to_megatron.py", "convert_megatron_to_hf.py"), folders, folders[1:], strict=False
        ):
            peaks.setdefault(tool, []).append(run_tool(tool, 1, str(source), str(target))[0])
    assert num_parameters * 2 > 0.9 * 2**30, "the larger model weighs more than the limit below by far"
    for tool, (small, large) in peaks.items():
        assert large - small <= 0.2, f"{tool}: {small} and {large} GiB"

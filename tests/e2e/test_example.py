"""The example for Qwen3-8B in each of its forms, with the tiny model: converting, serving, training, evaluating."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_a3po.runtime.processes import free_port
from tests.e2e.runs import ROOT, alive, descendants, environment, metrics, run_to_end, started, wait_until
from tests.support.deadlines import scaled

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SCRIPT = "examples/run_a3po_qwen3_8b.sh"
STEPS = 2
SMALL = [f"num_steps={STEPS}", "rollout.prompts_per_step=8", "evaluation.datasets.words_b.num_prompts=16"]
SMALL += ["evaluation.num_samples=2"]
WITHOUT_CHECKPOINTS = [*SMALL, "checkpoint.every_steps=0"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def check(run_dir: Path, output: str, *, servers: int) -> None:
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(STEPS + 1)), output
    assert all(row["servers_healthy"] == servers for row in rows)
    assert all(row["logprob_difference_max"] <= 1e-4 for row in rows)
    for row in (rows[0], rows[-1]):
        assert row["eval/words_a/average_low"] <= row["eval/words_a/average"] == row["eval_accuracy"]
        assert row["eval/words_b/average"] <= row["eval/words_b/pass_at_2"] <= 1
    samples = (run_dir / "evaluations" / f"step_{STEPS:08d}" / "samples.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in samples.splitlines()]
    assert len(records) == 2 * (64 + 16)
    assert all(record["weight_versions"] == [STEPS] for record in records)
    assert all(record["reward"] == (record["response"].strip() == record["answer"]) for record in records)
    assert "starting a rollout server at" in output and "is ready: models/tiny_qwen3-megatron, on the CPU" in output
    assert list((run_dir / "servers").iterdir()) == [], "servers are not registered any more"


def test_the_shell_script_trains_from_megatrons_weights_and_leaves_its_policy_in_both_formats(
    model: Path, tmp_path: Path
) -> None:
    """Its server starts without weights of its own, which the first publication brings."""
    run_dir, back = tmp_path / "run", tmp_path / "step1"
    saving = ["checkpoint.every_steps=1", "checkpoint.export_every_steps=1"]
    code, output = run_to_end(["bash", SCRIPT, f"run_dir={run_dir}", *SMALL, *saving], tmp_path / "output.log", 400)
    assert code == 0, output
    check(run_dir, output, servers=1)

    exported, final = run_dir / "exports" / "step_00000001", run_dir / "model"
    assert sorted(path.name for path in (run_dir / "exports").iterdir()) == ["step_00000001", "step_00000002"]
    checkpoint = run_dir / "checkpoints" / exported.name
    to_hf = [sys.executable, "tools/convert_megatron_to_hf.py", str(checkpoint), str(back), "--verify"]
    code, output = run_to_end(to_hf, tmp_path / "to_hf.log", 240.0)
    assert code == 0 and "equal bit by bit" in output, output
    folders = (back, exported, final)
    converted, *others = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(converted.keys() == other.keys() for other in others)
    assert [name for name in converted if not torch.equal(converted[name], others[0][name])] == []
    assert any(not torch.equal(others[1][name], others[0][name]) for name in converted)
    for folder in folders:
        loaded, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert len(tokenizer("spell").input_ids) > 0 and loaded.generation_config is not None
        assert (folder / "generation_config.json").exists()


@pytest.mark.nightly
def test_torchrun_takes_it_as_its_program_and_stops_it_with_its_servers(model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node",
        "4",
        SCRIPT,
        f"run_dir={run_dir}",
        *SMALL,
        "checkpoint.every_steps=0",
    ]
    with started(command, tmp_path / "output.log") as process:
        wait_until(lambda: len(metrics(run_dir)) > 1 or process.poll() is not None, 300)
        assert process.poll() is None, (tmp_path / "output.log").read_text()
        family = descendants(process.pid)
        process.terminate()
        process.wait(scaled(60))
        wait_until(lambda: not alive(family), 30)
    assert list((run_dir / "servers").iterdir()) == []


@pytest.mark.nightly
def test_two_nodes_train_together_each_with_its_own_server(model: Path, tmp_path: Path) -> None:
    run_dir, port = tmp_path / "run", free_port()
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        for node in range(2):
            command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
            command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two-nodes"]
            command = [
                "env",
                f"NODE_ADDRESS=127.0.0.{node + 1}",
                *command,
                SCRIPT,
                f"run_dir={run_dir}",
                *SMALL,
                "checkpoint.every_steps=0",
            ]
            processes.append(stack.enter_context(started(command, tmp_path / f"node{node}.log")))
        codes = [process.wait(scaled(400)) for process in processes]
    outputs = [(tmp_path / f"node{node}.log").read_text(errors="replace") for node in range(2)]
    assert codes == [0, 0], "\n".join(outputs)
    for node, output in enumerate(outputs):
        assert f"starting a rollout server at http://127.0.0.{node + 1}:" in output
    check(run_dir, "\n".join(outputs), servers=2)


def dry_run(*arguments: str, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry-run", *arguments],
        cwd=ROOT,
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )
    return done.returncode, done.stdout + done.stderr


def test_a_dry_run_says_what_would_run_where(model: Path, tmp_path: Path) -> None:
    if not (ROOT / "data" / "tiny_words").exists():
        subprocess.run([sys.executable, "tools/make_tiny_dataset.py"], cwd=ROOT, check=True, timeout=scaled(120))
    variables: dict[str, Any] = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    code, output = dry_run("seed=3", **variables)
    assert code == 0, output
    assert "node 1: training ranks 2 to 3" in output and "layout: 4 ranks = TP2 x PP2 x DP1" in output
    assert "rollouts: 2 servers (registered) x TP1" in output
    assert "--config configs/tiny_cpu_dataset.yaml" in output and "seed=3" in output


def test_what_is_missing_for_the_large_model_is_said_with_the_commands_that_bring_it(tmp_path: Path) -> None:
    code, output = dry_run(f"model={tmp_path}", DEVICE="cuda")
    assert code == 2
    assert "data.path = 'data/dapo-math-17k.parquet': there is no such file" in output
    assert "hf download" in output and "Traceback" not in output

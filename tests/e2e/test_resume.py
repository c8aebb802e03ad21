"""A run that is killed goes on from its last checkpoint when the same command is given again."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import alive, descendants, metrics, run_to_end, started, torchrun, train_in_forks, wait_until
from tests.support.deadlines import scaled

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_killed_run_goes_on_from_its_checkpoint_and_loses_or_repeats_nothing(
    server_url: str, model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = [f"model={model}", f"run_dir={run}", f"rollout.servers=[{server_url}]", "seed=3"]
    settings += ["num_steps=7", "checkpoint.every_steps=3", "rollout.prompts_per_step=8", "data.num_held_out=32"]
    log = tmp_path / "killed.log"
    with started(torchrun(*settings), log) as process:
        wait_until(
            lambda: len(metrics(run)) > 5, 240.0, lambda: log.read_text() if process.poll() is not None else None
        )
        everything = descendants(process.pid)
        os.kill(_rank_zero(everything), signal.SIGKILL)
        assert process.wait(scaled(60.0)) != 0
        wait_until(lambda: not alive(everything), 40.0)
    assert [row["step"] for row in metrics(run)][:5] == [0, 1, 2, 3, 4]

    code, output = train_in_forks(*settings, ranks=4, log=tmp_path / "resumed.log", timeout_seconds=240.0)
    assert code == 0, output
    assert "resumed: step 3 is published again" in output
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["weight_version"] for row in rows[1:]] == list(range(1, 8))
    assert max(row["staleness_max"] for row in rows[1:]) <= 2
    assert max(row["logprob_difference_max"] for row in rows) <= 1e-4
    ledger = json.loads((run / "summary.json").read_text())["ledger"]
    assert ledger["consumed"] == 7 * 8 and ledger["in_flight"] == ledger["buffered"] == 0
    assert ledger["issued"] == ledger["consumed"] + ledger["dropped"]

    code, output = train_in_forks(*settings, ranks=4, log=tmp_path / "finished.log", timeout_seconds=120.0)
    assert code == 0 and "this run has made its 7 steps; raise num_steps" in output
    code, output = run_to_end(torchrun(*settings, "algorithm.clip_epsilon_low=0.1"), tmp_path / "other.log", 120.0)
    assert code != 0 and "algorithm.clip_epsilon_low: 0.2 before, 0.1 now" in output


def _rank_zero(process_ids: list[int]) -> int:
    for number in process_ids:
        variables = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
        if b"RANK=0" in variables and b"megatron_a3po" in Path(f"/proc/{number}/cmdline").read_bytes():
            return number
    raise AssertionError(f"no rank 0 among {process_ids}")

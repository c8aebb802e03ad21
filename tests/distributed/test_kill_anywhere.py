"""A run that is killed anywhere and resumed equals the run that was never killed, to the last bit.

Runs are whole ones on TP2 x PP2, with publications to a server whose answers depend on the prompt alone.
"""

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_a3po.runtime.manifest import check, file_names
from tests.distributed import kill_ranks
from tests.distributed.launch import end_of_ranks
from tests.support.scripted_rollouts import make_model, scripted_server, settings

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

LAST_STEP = 4
TIMES = ("seconds", "wall_seconds", "tokens_per_second", "proximal_seconds")
Launch = Callable[..., list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    rank: int
    resumed_step: int
    """after which the resumed run goes on"""
    leaves: str | None = None
    """what the killed save leaves in `checkpoints`"""
    settings: dict[str, Any]


def kill(rank: int, resumed_step: int, leaves: str | None = None, **changes: Any) -> Kill:
    return Kill(rank=rank, resumed_step=resumed_step, leaves=leaves, settings=changes)


UNFINISHED = ".step_00000002.unfinished"
KILLS = {
    "die_in_forward": kill(1, 2),
    "die_in_backward": kill(3, 2),
    "die_in_optimizer": kill(2, 2),
    "die_before_publish": kill(3, 2),
    "die_in_publish": kill(0, 2),
    "die_before_begin": kill(0, 1),
    "die_in_shard": kill(1, 1, UNFINISHED),
    "die_after_shards": kill(2, 1, UNFINISHED),
    "die_before_manifest": kill(0, 1, UNFINISHED),
    "die_before_rename": kill(0, 1, UNFINISHED),
    "die_before_latest": kill(0, 2),
    "die_in_retention": kill(0, 2, ".step_00000001.deleted", checkpoint={"keep_last": 1}),
    "die_in_background": kill(2, 1, UNFINISHED, checkpoint={"asynchronous": True}),
}

EVERY_TIME = ("die_in_optimizer", "die_in_publish", "die_in_shard", "die_in_background")
OTHERS = [name for name in KILLS if name not in EVERY_TIME]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Starts a run with these settings, and returns the exit codes of its ranks."""
    model = make_model(tmp_path_factory.mktemp("runs") / "model")
    with scripted_server() as server:

        def launch(run_dir: Path, fault: str = "", ranks: tuple[int, ...] = (), **changes: Any) -> list[int]:
            config = json.dumps(settings(model, run_dir, server.url, **changes))
            arguments, log = (config, fault, json.dumps(ranks)), run_dir.with_suffix(".log")
            ended = end_of_ranks(kill_ranks.run_rank, 4, *arguments, log=log, timeout=100.0)
            assert not ended.is_late
            return ended.codes

        yield launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """All that two runs can differ in but for times."""

    files: dict[str, str]
    """SHA-256 of the last checkpoint's shards: weights, masters, moments, random states; and of the rollouts"""
    metrics: list[dict[str, Any]]
    """of every step, with the learning rate"""
    batches: dict[int, str]
    """SHA-256 of the trajectories and advantages that each step was made on"""
    model: bytes


def outcome(run_dir: Path, last_step: int = LAST_STEP) -> Outcome:
    files = check(run_dir / "checkpoints" / f"step_{last_step:08d}").files
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    batches = [json.loads(line) for line in (run_dir / "batches.jsonl").read_text().splitlines()]
    return Outcome(
        files={name: files[name].sha256 for name in files if name.endswith((".distcp", ".safetensors"))},
        metrics=[{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in metrics],
        batches={row["step"]: row["digest"] for row in batches},
        model=b"".join((run_dir / "model" / name).read_bytes() for name in file_names(run_dir / "model")),
    )


@pytest.fixture(scope="module")
def never_killed(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("never_killed") / "run"
    assert launch(run_dir, checkpoint={"keep_last": LAST_STEP}) == [0] * 4, log(run_dir)
    return run_dir


def log(run_dir: Path) -> str:
    logs = sorted(run_dir.parent.glob("*.log.rank*"))
    return "".join(f"\n--- {path.name} ---\n{path.read_text(errors='replace')[-3000:]}" for path in logs)


def test_the_run_is_worth_comparing(never_killed: Path) -> None:
    """Every step learns something from other trajectories, and the shards of a checkpoint have all that it learned."""
    expected = outcome(never_killed)
    assert [row["step"] for row in expected.metrics] == [0, 1, 2, 3, 4]
    assert min(row["gradient_norm"] for row in expected.metrics[1:]) > 0
    assert len({row["learning_rate"] for row in expected.metrics[1:]}) > 2
    assert len(expected.batches) == len(set(expected.batches.values())) == LAST_STEP
    assert len(expected.files) == 5, "four shards and the rollouts"
    before = outcome(never_killed, last_step=3)
    assert all(before.files[name] != expected.files[name] for name in expected.files)


@pytest.mark.parametrize("where", [*EVERY_TIME, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_a_run_that_is_killed_and_resumed_equals_the_run_that_was_never_killed(
    launch: Launch, never_killed: Path, tmp_path: Path, where: str
) -> None:
    run_dir, case = tmp_path / "run", KILLS[where]
    codes = launch(run_dir, where, (case.rank,), **case.settings)
    # The others are killed when it is, if they have not noticed before.
    assert codes[case.rank] == -signal.SIGKILL and 0 not in codes, log(run_dir)
    left = {path.name for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".")}
    assert left == ({case.leaves} if case.leaves else set())

    assert launch(run_dir, **case.settings) == [0] * 4, log(run_dir)
    said = run_dir.with_suffix(".log.rank0").read_text()
    assert f"resumed: step {case.resumed_step} is published again" in said
    assert outcome(run_dir) == outcome(never_killed)
    kept = case.settings.get("checkpoint", {}).get("keep_last", 2)
    names = [f"step_{step:08d}" for step in range(LAST_STEP - kept + 1, LAST_STEP + 1)]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["latest", *names]


def test_a_run_that_starts_from_a_checkpoint_of_another_run_goes_on_as_that_one_did(
    launch: Launch, never_killed: Path, tmp_path: Path
) -> None:
    run_dir, origin = tmp_path / "run", never_killed / "checkpoints" / "step_00000002"
    assert launch(run_dir, resume=str(origin)) == [0] * 4, log(run_dir)

    ours, theirs = outcome(run_dir), outcome(never_killed)
    assert ours.files == theirs.files and ours.model == theirs.model
    assert ours.metrics == theirs.metrics[3:]
    assert ours.batches == {step: theirs.batches[step] for step in (3, 4)}


def test_a_checkpoint_that_is_written_while_training_goes_on_has_the_state_of_its_step(
    launch: Launch, never_killed: Path, tmp_path: Path
) -> None:
    """Step 3 is made, and step 4 begun, before the first tensor of the checkpoint of step 2 is written."""
    run_dir = tmp_path / "run"
    settings = {"checkpoint": {"asynchronous": True, "every_steps": 2}}
    assert launch(run_dir, "write_slowly", (0, 1, 2, 3), **settings) == [0] * 4, log(run_dir)

    assert outcome(run_dir) == outcome(never_killed)
    assert outcome(run_dir, last_step=2).files == outcome(never_killed, last_step=2).files

"""Which checkpoints a start of a run tries, and which wishes are refused before anything starts."""

import shutil
from pathlib import Path

import pytest
import yaml

from megatron_a3po.checkpoint.resume import plan_resume, record_origin
from megatron_a3po.checkpoint.store import CheckpointStore
from megatron_a3po.errors import ConfigError
from megatron_a3po.runtime.manifest import describe
from megatron_a3po.runtime.run_dir import claim_run_dir

CONFIG = {"seed": 0, "num_steps": 60, "max_staleness": 2, "resume": "auto"}
RESOLVED = yaml.safe_dump(CONFIG)


def save(run_dir: Path, *steps: int) -> list[Path]:
    """A run that has saved checkpoints of these steps."""
    store = CheckpointStore(run_dir / "checkpoints", keep_last=9, keep_every=0)
    if not (run_dir / "config.resolved.yaml").exists():
        claim_run_dir(run_dir, RESOLVED).release()
    folders = []
    for step in steps:
        folder = store.begin(step)
        (folder / "shard").write_bytes(bytes([step]) * 100)
        (folder / "config.resolved.yaml").write_text(RESOLVED)
        folders.append(store.commit(step, describe(folder), {}))
    return folders


def refusal(run_dir: Path, resume: Path, resolved: str = RESOLVED) -> str:
    with pytest.raises(ConfigError) as error:
        plan_resume(run_dir, resume, resolved)
    assert str(error.value).startswith(f"resume = {resume}: ")
    return str(error.value)


def test_auto_tries_the_newest_first_and_a_run_without_checkpoints_starts_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert plan_resume(run, "auto", RESOLVED).candidates == ()
    ten, twenty = save(run, 10, 20)

    plan = plan_resume(run, "auto", RESOLVED)
    assert plan.candidates == (twenty, ten) and not plan.must_resume
    with pytest.raises(ConfigError, match="there is a run in this folder"):
        plan_resume(run, "none", RESOLVED)


def test_a_named_checkpoint_is_the_only_candidate_in_its_own_run_and_in_a_fresh_folder(tmp_path: Path) -> None:
    ten, _ = save(tmp_path / "run", 10, 20)

    for run_dir in (tmp_path / "run", tmp_path / "fresh"):
        plan = plan_resume(run_dir, ten, RESOLVED)
        assert plan.candidates == (ten,) and plan.must_resume
    assert not (tmp_path / "fresh").exists(), "planning only reads"


def test_the_same_command_again_goes_on_from_what_the_run_has_saved_since(tmp_path: Path) -> None:
    (ten,) = save(tmp_path / "run", 10)
    for run_dir, later in ((tmp_path / "run", 30), (tmp_path / "fresh", 20)):
        claim_run_dir(run_dir, RESOLVED, resume=True).release()
        record_origin(run_dir, ten)
        wishes = [ten] if run_dir.name == "run" else [ten, "auto"]
        for resume in wishes:
            assert plan_resume(run_dir, resume, RESOLVED).candidates == (ten,), "killed before its first save"
        (newer,) = save(run_dir, later)
        for resume in wishes:
            assert plan_resume(run_dir, resume, RESOLVED).candidates == (newer, ten)
        (run_dir / "checkpoints" / "resumed_from").unlink()
    assert plan_resume(tmp_path / "run", ten, RESOLVED).candidates == (ten,), "back to it once more"


def test_the_same_command_again_does_not_need_the_named_checkpoint_once_there_are_newer_ones(tmp_path: Path) -> None:
    ten, twenty = save(tmp_path / "run", 10, 20)
    record_origin(tmp_path / "run", ten)
    shutil.rmtree(ten)  # as retention does

    assert plan_resume(tmp_path / "run", ten, RESOLVED).candidates == (twenty, ten)


def test_a_path_that_is_no_checkpoint_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (ten,) = save(tmp_path / "run", 10)
    assert "no such folder; give the folder of a checkpoint" in refusal(tmp_path / "run", tmp_path / "nowhere")
    assert "use `resume=auto`" in refusal(tmp_path / "run", Path("atuo"))
    assert "manifest.json is missing" in refusal(tmp_path / "run", tmp_path / "run")
    (ten / "manifest.json").write_bytes(b"{}")
    assert "manifest.json is damaged" in refusal(tmp_path / "run", ten)


def test_a_used_folder_takes_no_checkpoint_of_another_run(tmp_path: Path) -> None:
    (ten,) = save(tmp_path / "other", 10)
    save(tmp_path / "run", 10)
    claim_run_dir(tmp_path / "without", RESOLVED).release()
    assert plan_resume(tmp_path / "without", ten, RESOLVED).candidates == (ten,), "claimed, and nothing in it yet"
    (tmp_path / "without" / "metrics.jsonl").write_text('{"step": 0}\n')

    for run_dir in (tmp_path / "run", tmp_path / "without"):
        message = refusal(run_dir, ten)
        assert "did not start from this checkpoint; give a new folder (`run_dir=...`)" in message


def test_every_setting_that_must_not_change_since_the_named_checkpoint_is_named(tmp_path: Path) -> None:
    (ten,) = save(tmp_path / "run", 10)
    changed = CONFIG | {"seed": 1, "max_staleness": 3, "num_steps": 90, "resume": str(ten)}

    lines = refusal(tmp_path / "fresh", ten, yaml.safe_dump(changed)).splitlines()
    assert lines[1:-1] == ["  max_staleness: 2 before, 3 now", "  seed: 0 before, 1 now"]
    allowed = yaml.safe_dump(changed | {"seed": 0, "max_staleness": 2})
    assert plan_resume(tmp_path / "fresh", ten, allowed).candidates == (ten,)

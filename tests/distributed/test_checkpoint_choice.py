"""All ranks agree on the checkpoint to resume from, whichever of them finds a file damaged."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

NUM_FILES = 8


@pytest.mark.distributed
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "none"])
def test_a_damaged_newest_checkpoint_is_passed_over_by_every_rank(tmp_path: Path, damage: str) -> None:
    output = run_ranks(_choose, 4, str(tmp_path), damage)
    (seen,) = [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    damaged = damage != "none"
    assert seen["steps"] == [10 if damaged else 20] * 4
    assert seen["set_aside"] == (["step_00000020.set_aside"] if damaged else [])
    if damaged:
        assert ("manifest.json" if damage == "manifest" else "shard5") in output


def _choose(folder: str, damage: str) -> None:
    import torch.distributed as dist

    from megatron_a3po.actor.checkpoint import CheckpointManager
    from megatron_a3po.config import RunConfig
    from megatron_a3po.parallel.messages import gather_json
    from megatron_a3po.runtime.timing import PhaseTimer

    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    root = Path(folder) / "run" / "checkpoints"
    if dist.get_rank() == 0:
        _save_two(root)
        _damage(root / "step_00000020", damage)
    dist.barrier()
    described = {"model": folder, "run_dir": Path(folder) / "run", "num_steps": 99, "data": {"task": "t"}}
    config = RunConfig.model_validate(described)
    step = CheckpointManager(config, dist.group.WORLD, PhaseTimer()).choose()
    steps = gather_json(step)
    if dist.get_rank() == 0:
        aside = sorted(path.name for path in root.iterdir() if path.name.endswith("set_aside"))
        print(json.dumps({"steps": steps, "set_aside": aside}), flush=True)
    dist.destroy_process_group()


@pytest.mark.distributed
def test_a_named_checkpoint_that_is_damaged_ends_every_rank_and_nothing_else_is_chosen(tmp_path: Path) -> None:
    output = run_ranks(_choose_named, 4, str(tmp_path))

    messages = json.loads(next(line for line in output.splitlines() if line.startswith("[")))
    assert len(messages) == 4 and len(set(messages)) == 1
    assert messages[0].startswith("resume = ") and "shard5 has other content than was written" in messages[0]


def _choose_named(folder: str) -> None:
    import torch.distributed as dist

    from megatron_a3po.actor.checkpoint import CheckpointManager
    from megatron_a3po.config import RunConfig, to_yaml
    from megatron_a3po.errors import ConfigError
    from megatron_a3po.parallel.messages import gather_json
    from megatron_a3po.runtime.timing import PhaseTimer

    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    root = Path(folder) / "run" / "checkpoints"
    named = root / "step_00000020"
    described = {"model": folder, "run_dir": Path(folder) / "run", "num_steps": 99, "data": {"task": "t"}}
    config = RunConfig.model_validate(described | {"resume": named})
    if dist.get_rank() == 0:
        _save_two(root, to_yaml(config))
        _damage(named, "flip")
    dist.barrier()
    try:
        message = f"step {CheckpointManager(config, dist.group.WORLD, PhaseTimer()).choose()}"
    except ConfigError as error:
        message = str(error)
    messages = gather_json(message)
    if dist.get_rank() == 0:
        print(json.dumps(messages), flush=True)
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["OSError", "CheckpointException", "OSError in the background"])
def test_a_rank_that_cannot_write_stops_all_of_them_and_the_older_checkpoint_stays(tmp_path: Path, kind: str) -> None:
    output = run_ranks(_fail_to_save, 4, str(tmp_path), kind)

    errors = json.loads(next(line for line in output.splitlines() if line.startswith("[")))
    assert len(errors) == 4 and len(set(errors)) == 1
    assert "No space left" in errors[0] and "step_00000020 was saved whole" in errors[0]


def _fail_to_save(folder: str, kind: str) -> None:
    from types import SimpleNamespace
    from typing import Any

    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_a3po.actor.checkpoint import CheckpointManager
    from megatron_a3po.config import RunConfig
    from megatron_a3po.data.rollout_state import RolloutState
    from megatron_a3po.errors import CheckpointError
    from megatron_a3po.parallel.messages import gather_json
    from megatron_a3po.runtime.timing import PhaseTimer

    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    if dist.get_rank() == 0:
        _save_two(Path(folder) / "run" / "checkpoints")
    dist.barrier()
    error = OSError(28, "No space left on device")
    failure = error if kind.startswith("OSError") else CheckpointException("write", {2: (error, None)})  # type: ignore[dict-item]

    def fail() -> None:
        if dist.get_rank() == 2:
            raise failure

    state: Any = SimpleNamespace(
        file_names=[], METADATA_FILES=(), write=fail, finish=lambda: None, copy_to_host=lambda: None
    )
    if kind == "CheckpointException":  # which comes where Megatron's ranks exchange what they have written
        state.write, state.finish = state.finish, state.write
    rollouts = RolloutState(version=30, next_batch=30, issued=30, consumed=30, dropped={}, buffered=(), in_flight=())

    described = {"model": folder, "run_dir": Path(folder) / "run", "num_steps": 99, "data": {"task": "t"}}
    manager: Any = CheckpointManager(RunConfig.model_validate(described), dist.group.WORLD, PhaseTimer())
    manager._needed_bytes = lambda: 0  # there is no model here
    try:
        actor: Any = SimpleNamespace(plan_save=lambda _: state, version=30)
        manager.save(30, actor, rollouts, wait="background" not in kind)
        while True:  # as after each of the next steps
            manager.save_if_due(31, actor, lambda: rollouts)
    except CheckpointError as raised:
        message = str(raised)
    messages = gather_json(message)
    if dist.get_rank() == 0:
        print(json.dumps(messages), flush=True)
    dist.destroy_process_group()


def _save_two(root: Path, config: str = "") -> None:
    from megatron_a3po.runtime.checkpoints import CheckpointStore
    from megatron_a3po.runtime.manifest import describe

    store = CheckpointStore(root, keep_last=2, keep_every=0)
    for step in (10, 20):
        folder = store.begin(step)
        for number in range(NUM_FILES):
            (folder / f"shard{number}").write_bytes(bytes([number, step]) * 1000)
        (folder / "config.resolved.yaml").write_text(config)
        store.commit(step, describe(folder), {})


def _damage(folder: Path, damage: str) -> None:
    file = folder / ("manifest.json" if damage == "manifest" else "shard5")
    content = file.read_bytes()
    if damage == "remove":
        file.unlink()
    elif damage == "truncate":
        file.write_bytes(content[:-1])
    elif damage != "none":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])

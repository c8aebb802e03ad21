"""All ranks agree on the checkpoint to resume from, whichever of them finds a file damaged."""

import errno
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

    from megatron_a3po.checkpoint.manager import CheckpointManager
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
    manager = CheckpointManager(config, dist.group.WORLD, PhaseTimer())
    steps = gather_json(manager.choose())
    loaded: list[Path] = []

    def load(folder: Path, *, same_layout: bool) -> None:
        assert not same_layout and _set_aside(root) == [], "before it is known that the older one can be loaded"
        loaded.append(folder)

    actor: Any = SimpleNamespace(load=load)
    rollouts = manager.load(actor)
    assert loaded == [root / f"step_000000{steps[0]}"] and (rollouts is not None) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        print(json.dumps({"steps": steps, "set_aside": _set_aside(root)}), flush=True)
    dist.destroy_process_group()


def _set_aside(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.endswith("set_aside"))


REFUSED = {
    "all damaged": r"none is valid: .*step_00000020: shard5 has other.*step_00000010: shard5 has other.*run_dir=",
    "EIO": r"rank 2 on \S+: .*step_00000020/shard2: cannot be read .*Input/output error.*mounted",
    "not there": r"rank 2 on \S+: .*step_00000020: no such folder.*other ranks see .* start again",
    "newer": r"rank 0 on \S+: .*step_00000020: .*format 2.* resume with the version",
}


@pytest.mark.distributed
def test_a_run_with_checkpoints_never_starts_over_nor_goes_further_back_for_a_node_without_its_files(
    tmp_path: Path,
) -> None:
    output = run_ranks(_refuse_all, 4, str(tmp_path))

    seen = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    for (trouble, expected), messages in zip(REFUSED.items(), seen, strict=True):
        assert len(messages) == 4 and len(set(messages)) == 1
        assert re.search(expected, messages[0]), messages[0]
        left = sorted(path.name for path in (tmp_path / trouble / "run" / "checkpoints").iterdir())
        assert left == ["latest", "step_00000010", "step_00000020"]


def _refuse_all(folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for trouble in REFUSED:
        _refuse(f"{folder}/{trouble}", trouble)
    dist.destroy_process_group()


def _refuse(folder: str, trouble: str) -> None:
    import torch.distributed as dist

    from megatron_a3po.checkpoint.manager import CheckpointManager
    from megatron_a3po.config import RunConfig
    from megatron_a3po.errors import CheckpointError
    from megatron_a3po.parallel.messages import gather_json
    from megatron_a3po.runtime.timing import PhaseTimer

    assert dist.group.WORLD is not None
    root = Path(folder) / "run" / "checkpoints"
    if dist.get_rank() == 0:
        root.parent.mkdir(parents=True)
        _save_two(root)
        if trouble == "all damaged":
            _damage(root / "step_00000010", "flip")
            _damage(root / "step_00000020", "flip")
        if trouble == "newer":
            manifest = root / "step_00000020" / "manifest.json"
            manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    dist.barrier()
    if dist.get_rank() == 2:
        _break_this_node(root / "step_00000020", trouble)
    described = {"model": folder, "run_dir": Path(folder) / "run", "num_steps": 99, "data": {"task": "t"}}
    try:
        step = CheckpointManager(RunConfig.model_validate(described), dist.group.WORLD, PhaseTimer()).choose()
        message = f"step {step}"
    except CheckpointError as error:
        message = str(error)
    messages = gather_json(message)
    if dist.get_rank() == 0:
        print(json.dumps(messages), flush=True)


def _break_this_node(folder: Path, trouble: str) -> None:
    if trouble == "EIO":
        original = Path.stat

        def stat(path: Path, **keywords: Any) -> Any:
            if path == folder / "shard2":
                raise OSError(errno.EIO, "Input/output error")
            return original(path, **keywords)

        Path.stat = stat  # type: ignore[method-assign, assignment]
    elif trouble == "not there":
        is_dir = Path.is_dir
        Path.is_dir = lambda path: path != folder and is_dir(path)  # type: ignore[method-assign, misc, assignment]


@pytest.mark.distributed
def test_a_named_checkpoint_that_is_damaged_ends_every_rank_and_nothing_else_is_chosen(tmp_path: Path) -> None:
    output = run_ranks(_choose_named, 4, str(tmp_path))

    messages = json.loads(next(line for line in output.splitlines() if line.startswith("[")))
    assert len(messages) == 4 and len(set(messages)) == 1
    assert messages[0].startswith("resume = ") and "shard5 has other content than was written" in messages[0]


def _choose_named(folder: str) -> None:
    import torch.distributed as dist

    from megatron_a3po.checkpoint.manager import CheckpointManager
    from megatron_a3po.config import RunConfig
    from megatron_a3po.errors import ConfigError
    from megatron_a3po.parallel.messages import gather_json
    from megatron_a3po.preflight.load import to_yaml
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
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_a3po.checkpoint.manager import CheckpointManager
    from megatron_a3po.config import RunConfig
    from megatron_a3po.errors import CheckpointError
    from megatron_a3po.parallel.messages import gather_json
    from megatron_a3po.rollout.state import RolloutState
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
    from megatron_a3po.checkpoint.store import CheckpointStore
    from megatron_a3po.rollout.state import RolloutState, save_rollout_state
    from megatron_a3po.runtime.manifest import describe

    rollouts = RolloutState(version=0, next_batch=0, issued=0, consumed=0, dropped={}, buffered=(), in_flight=())
    store = CheckpointStore(root, keep_last=2, keep_every=0)
    for step in (10, 20):
        folder = store.begin(step)
        for number in range(NUM_FILES):
            (folder / f"shard{number}").write_bytes(bytes([number, step]) * 1000)
        (folder / "config.resolved.yaml").write_text(config)
        save_rollout_state(rollouts, folder / "rollouts.safetensors")
        store.commit(step, describe(folder), {"layout": "another"})


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

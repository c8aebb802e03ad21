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


def _save_two(root: Path) -> None:
    from megatron_a3po.runtime.checkpoints import CheckpointStore
    from megatron_a3po.runtime.manifest import describe

    store = CheckpointStore(root, keep_last=2, keep_every=0)
    for step in (10, 20):
        folder = store.begin(step)
        for number in range(NUM_FILES):
            (folder / f"shard{number}").write_bytes(bytes([number, step]) * 1000)
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

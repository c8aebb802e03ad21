"""Checkpoints of a run: everything that it needs to go on as if it had never been killed.

Beside Megatron's files (`actor/training_state.py`) a checkpoint holds `rollouts.safetensors` (`data/rollout_state.py`)
and `config.resolved.yaml`; `runtime/checkpoints.py` makes it appear whole or not at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_a3po.config import RunConfig, load_architecture, to_yaml
from megatron_a3po.data.rollout_state import RolloutState, load_rollout_state, save_rollout_state
from megatron_a3po.errors import CheckpointError, ConfigError
from megatron_a3po.parallel.messages import broadcast_json, gather_json
from megatron_a3po.runtime.checkpoints import CheckpointStore, newest_valid
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.manifest import FileRecord, Manifest, check, describe, read_manifest
from megatron_a3po.runtime.resume import plan_resume, record_origin
from megatron_a3po.runtime.run_dir import CONFIG_FILE
from megatron_a3po.runtime.timing import PhaseTimer

if TYPE_CHECKING:
    from megatron_a3po.actor.actor import PolicyActor  # it imports Megatron, for which the process is not ready yet

ROLLOUTS_FILE = "rollouts.safetensors"


class CheckpointManager:
    """All methods are collective over all ranks, which must see the same `run_dir`."""

    def __init__(self, config: RunConfig, group: dist.ProcessGroup, timer: PhaseTimer) -> None:
        """`group`: all ranks, gloo, patient: a rank may write for long while the others wait."""
        self._config = config
        self._timer = timer
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._store = CheckpointStore(
            config.run_dir / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
        )
        self._resumed: tuple[Path, Manifest] | None = None
        self._saved_step = 0
        """The newest that a resumed run would go on from; 0: from the start."""

    def choose(self) -> int:
        """The step of the first valid checkpoint of the plan, after which the run goes on; 0 for one from the start.

        Says which checkpoints are not valid, and why. Raises ConfigError if none is that the user has named, or if the
        run has made all of its steps.
        """
        candidates, must_resume = self._plan()
        choice = newest_valid(candidates, self._check_together)
        if must_resume and choice.folder is None:
            raise ConfigError(f"resume = {self._config.resume}: {'; '.join(choice.rejected.values())}")
        for folder, reason in choice.rejected.items():
            logger.warning("not resumed from %s: %s", folder.name, reason)
        if choice.folder is not None and choice.manifest is not None:
            self._resumed = choice.folder, choice.manifest
        step = self._saved_step = self._resumed[1].step if self._resumed is not None else 0
        if self._resumed is not None and step >= self._config.num_steps:
            raise ConfigError(
                f"run_dir = {self._config.run_dir}: this run has made its {step} steps; raise num_steps to go on with "
                "it, or give another folder (`run_dir=...`)"
            )
        if self._rank == 0:
            for path in self._store.set_aside_after(step if self._resumed is not None else -1):
                logger.warning("set aside as %s", path.name)
            record_origin(self._config.run_dir, self._config.resume)
        return step

    def _plan(self) -> tuple[list[Path], bool]:
        """The plan of rank 0, which has claimed the folder, on every rank."""
        described = None
        if self._rank == 0 and self._config.resume != "none":
            plan = plan_resume(self._config.run_dir, self._config.resume, to_yaml(self._config))
            described = [list(map(str, plan.candidates)), plan.must_resume]
        folders, must_resume = broadcast_json(described, self._group) or ([], False)
        return list(map(Path, folders)), must_resume

    def load(self, actor: PolicyActor) -> RolloutState | None:
        """Bring the actor to the chosen checkpoint; returns what the rollouts need, on rank 0. None without one."""
        if self._resumed is None:
            return None
        folder, manifest = self._resumed
        actor.load(folder, same_layout=manifest.facts["layout"] == self._layout())
        return load_rollout_state(folder / ROLLOUTS_FILE) if self._rank == 0 else None

    def save_if_due(self, step: int, actor: PolicyActor, rollouts: Callable[[], RolloutState | None]) -> None:
        """To be called after every step. `rollouts` gives what rank 0 knows of them."""
        if self._config.checkpoint.is_due(step, self._config.num_steps):
            self.save(step, actor, rollouts())

    def save_before_end(self, step: int, actor: PolicyActor, rollouts: Callable[[], RolloutState | None]) -> None:
        """Save the last step that was made, unless it is saved already, or none was made."""
        if step > self._saved_step:
            self.save(step, actor, rollouts())

    def save(self, step: int, actor: PolicyActor, rollouts: RolloutState | None) -> None:
        """Write the checkpoint of this step. `rollouts`: on rank 0. Raises CheckpointError on every rank."""
        with self._timer.phase("checkpoint"):
            self._save(step, actor, rollouts)

    def _save(self, step: int, actor: PolicyActor, rollouts: RolloutState | None) -> None:
        store, folder = self._store, self._store.unfinished_folder(step)
        self._on_rank_zero(lambda: store.begin(step, self._needed_bytes()))
        self._everywhere(lambda: self._write_training_state(step, folder, actor))
        self._on_rank_zero(lambda: self._write_own_files(step, folder, rollouts))
        described = self._everywhere(lambda: self._described(step, folder))
        records = {name: FileRecord(**record) for share in described for name, record in share.items()}
        facts = {"layout": self._layout(), "version": actor.version}
        self._on_rank_zero(lambda: store.commit(step, records, facts))
        self._saved_step = step

    def _write_training_state(self, step: int, folder: Path, actor: PolicyActor) -> None:
        """A rank that fails in the midst of Megatron's collectives leaves the others to their timeout."""
        with self._store.saving(step):
            try:
                actor.save(folder)
            except CheckpointException as error:  # torch's, which gathers what went wrong on all ranks
                raise OSError(str(error)) from error

    def _write_own_files(self, step: int, folder: Path, rollouts: RolloutState | None) -> None:
        assert rollouts is not None, "rank 0 knows the rollouts"
        with self._store.saving(step):
            save_rollout_state(rollouts, folder / ROLLOUTS_FILE)
            (folder / CONFIG_FILE).write_text(to_yaml(self._config), encoding="utf-8")

    def _described(self, step: int, folder: Path) -> dict[str, Any]:
        with self._store.saving(step):
            records = describe(folder, self._rank, self._world_size)
        return {name: dataclasses.asdict(record) for name, record in records.items()}

    def _needed_bytes(self) -> int:
        """Weights, and in float32 the masters and both moments; the rest is small."""
        item_bytes = 4 if self._config.precision == "fp32" else 2
        return (item_bytes + 3 * 4) * load_architecture(self._config.model).num_parameters

    def _layout(self) -> dict[str, int]:
        parallel = self._config.parallel.model_dump(exclude={"overlap"})
        return {**parallel, "world_size": self._world_size}

    def _check_together(self, folder: Path) -> Manifest:
        """Each rank checks its share of the files; what one finds wrong is wrong for all."""
        self._everywhere(lambda: check(folder, self._rank, self._world_size).step)
        return read_manifest(folder)

    def _on_rank_zero(self, work: Callable[[], Any]) -> None:
        def there() -> None:
            if self._rank == 0:
                work()

        self._everywhere(there)

    def _everywhere(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` gives on all ranks (JSON). Raises CheckpointError on every rank if it failed on one."""
        result, failure = None, None
        try:
            result = work()
        except CheckpointError as error:
            failure = str(error)
        answers = gather_json([result, failure], self._group)
        for _, text in answers:
            if text is not None:
                raise CheckpointError(text)
        return [value for value, _ in answers]

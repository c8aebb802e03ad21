"""Save and load everything that a run needs to continue as if it had never been killed.

A checkpoint holds Megatron's files (actor/megatron_state.py), `rollouts.safetensors` (rollout/state.py) and
`config.resolved.yaml`. On all ranks, the CheckpointManager chooses the checkpoint to resume from, loads it, and writes
new ones. resume.py tells it which checkpoints to try; store.py keeps the folder that they are in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_a3po.checkpoint.resume import plan_resume, record_origin
from megatron_a3po.checkpoint.store import CheckpointStore, Finding, newest_valid, verdict
from megatron_a3po.config import RunConfig
from megatron_a3po.errors import CheckpointError, ConfigError, RunFinished
from megatron_a3po.parallel.agreement import on_all_ranks
from megatron_a3po.parallel.messages import broadcast_json, gather_json
from megatron_a3po.preflight.load import load_architecture, to_yaml
from megatron_a3po.rollout.state import RolloutState, load_rollout_state, save_rollout_state
from megatron_a3po.runtime.background import in_background
from megatron_a3po.runtime.files import writing
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.manifest import FileRecord, Manifest, check, describe_files
from megatron_a3po.runtime.run_dir import CONFIG_FILE
from megatron_a3po.runtime.timing import PhaseTimer

if TYPE_CHECKING:
    # They import Megatron, for which the process is not ready yet.
    from megatron_a3po.actor.actor import PolicyActor
    from megatron_a3po.actor.megatron_state import TrainingStateSave

ROLLOUTS_FILE = "rollouts.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _UnfinishedSave:
    step: int
    facts: dict[str, Any]
    state: TrainingStateSave
    written: Future[dict[str, Any]]
    """the records of this rank's files, once they are on the disk"""


class CheckpointManager:
    """The checkpoints of a run. All methods are collective over all ranks, which must see the same `run_dir`."""

    def __init__(self, config: RunConfig, group: dist.ProcessGroup, timer: PhaseTimer) -> None:
        """`group`: the gloo group of all ranks. Its timeout is long, since a rank may write while the others wait."""
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
        self._unfinished: _UnfinishedSave | None = None
        self._saved_step = 0
        """The step that a resumed run would continue from; 0: from the start"""

    def choose(self) -> int:
        """Choose the newest valid checkpoint and return its step; 0 without a checkpoint.

        Logs which newer checkpoints are not valid, and why. Changes nothing on the disk. Raises ConfigError if a
        checkpoint that the user named is not valid, CheckpointError if there are checkpoints and none is valid, or one
        cannot be read, and RunFinished if the run has made all of its steps.
        """
        candidates, must_resume = self._plan()
        choice = newest_valid(candidates, self._check_together)
        if choice.folder is None and choice.rejected:
            reasons = "; ".join(choice.rejected.values())
            if must_resume:
                raise ConfigError(f"resume = {self._config.resume}: {reasons}")
            raise CheckpointError(
                f"run_dir = {self._config.run_dir}: has checkpoints, and none is valid: {reasons}. Restore one, "
                "move them away to start over, or give another folder (`run_dir=...`)"
            )
        for folder, reason in choice.rejected.items():
            logger.warning("not resumed from %s: %s", folder.name, reason)
        if choice.folder is not None and choice.manifest is not None:
            self._resumed = choice.folder, choice.manifest
        step = self._saved_step = self._resumed[1].step if self._resumed is not None else 0
        if self._resumed is not None and step >= self._config.num_steps:
            raise RunFinished(
                f"run_dir = {self._config.run_dir}: this run has made its {step} steps; raise num_steps to go on with "
                "it, or give another folder (`run_dir=...`)"
            )
        return step

    def _plan(self) -> tuple[list[Path], bool]:
        """Return rank 0's candidates, and whether one must be resumed, on every rank."""
        described = None
        if self._rank == 0 and self._config.resume != "none":
            plan = plan_resume(self._config.run_dir, self._config.resume, to_yaml(self._config))
            described = [list(map(str, plan.candidates)), plan.must_resume]
        folders, must_resume = broadcast_json(described, self._group) or ([], False)
        return list(map(Path, folders)), must_resume

    def load(self, actor: PolicyActor) -> RolloutState | None:
        """Load the chosen checkpoint into the actor and return the state of the rollouts on rank 0; None without one.

        Afterwards the checkpoints that the run does not continue are set aside.
        """
        if self._resumed is None:
            return None
        folder, manifest = self._resumed
        actor.load(folder, same_layout=manifest.facts["layout"] == self._layout())
        rollouts = load_rollout_state(folder / ROLLOUTS_FILE) if self._rank == 0 else None
        dist.barrier(self._group)
        self._on_rank_zero(lambda: self._leave_others(manifest.step))
        return rollouts

    def _leave_others(self, step: int) -> None:
        with writing(self._config.run_dir / "checkpoints", "see that the run may write there, and start it again"):
            for path in self._store.set_aside_after(step):
                logger.warning("set aside as %s", path.name)
            record_origin(self._config.run_dir, self._config.resume)

    def save_if_due(self, step: int, actor: PolicyActor, rollouts: Callable[[], RolloutState | None]) -> None:
        """Save if the configuration says so for this step, or finish a save that was written in the background.

        Call it after every step. `rollouts` returns the state of the rollouts on rank 0. Raises CheckpointError on
        every rank, also for what went wrong in the background since the last call.
        """
        config = self._config
        if config.checkpoint.is_due(step, config.num_steps):
            # Nothing goes on beside the saving of the last step.
            self.save(step, actor, rollouts(), wait=step == config.num_steps or not config.checkpoint.asynchronous)
        elif self._unfinished is not None and all(gather_json(self._unfinished.written.done(), self._group)):
            self._finish()

    def save_before_end(self, step: int, actor: PolicyActor, rollouts: Callable[[], RolloutState | None]) -> None:
        """Save the last step of the run, unless it is saved already or the run made no step."""
        self._finish()
        if step > self._saved_step:
            self.save(step, actor, rollouts())

    def save(self, step: int, actor: PolicyActor, rollouts: RolloutState | None, *, wait: bool = True) -> None:
        """Write the checkpoint of this step. `rollouts`: on rank 0. Raises CheckpointError on every rank.

        Without `wait`, the state is copied and written while training continues; a later `save_if_due` finishes it.
        """
        self._finish()
        with self._timer.phase("checkpoint"):
            folder = self._store.unfinished_folder(step)
            self._on_rank_zero(lambda: self._store.begin(step, self._needed_bytes()))
            state = self._together(lambda: self._with_megatron(step, lambda: actor.plan_save(folder)))
            if not wait:
                state.copy_to_host()
            self._unfinished = _UnfinishedSave(
                step=step,
                facts={"layout": self._layout(), "version": actor.version},
                state=state,
                written=in_background(lambda: self._write(step, folder, state, rollouts), "checkpoint"),
            )
        if wait:
            self._finish()

    def _finish(self) -> None:
        """Wait until all ranks have written the unfinished save, if there is one, and make it a checkpoint."""
        if self._unfinished is None:
            return
        save, self._unfinished = self._unfinished, None
        with self._timer.phase("checkpoint"):
            written = gather_json(self._together(save.written.result), self._group)
            self._together(lambda: self._with_megatron(save.step, save.state.finish))
            records = {name: FileRecord(**record) for share in written for name, record in share.items()}
            self._on_rank_zero(lambda: self._commit(save, records))
        self._saved_step = save.step

    def _write(
        self, step: int, folder: Path, state: TrainingStateSave, rollouts: RolloutState | None
    ) -> dict[str, Any]:
        """Write this rank's files and return their records. Not collective."""
        with self._store.saving(step):
            state.write()
            names = state.file_names
            if self._rank == 0:
                assert rollouts is not None, "rank 0 knows the rollouts"
                save_rollout_state(rollouts, folder / ROLLOUTS_FILE)
                (folder / CONFIG_FILE).write_text(to_yaml(self._config), encoding="utf-8")
                names = [*names, ROLLOUTS_FILE, CONFIG_FILE]
            return {name: dataclasses.asdict(record) for name, record in describe_files(folder, names).items()}

    def _commit(self, save: _UnfinishedSave, records: dict[str, FileRecord]) -> None:
        with self._store.saving(save.step):
            of_megatron = describe_files(self._store.unfinished_folder(save.step), save.state.METADATA_FILES)
        self._store.commit(save.step, records | of_megatron, save.facts)

    def _with_megatron[T](self, step: int, work: Callable[[], T]) -> T:
        """Turn torch's error into an OSError. If a rank fails in Megatron's collectives, the others time out."""
        with self._store.saving(step):
            try:
                return work()
            except CheckpointException as error:  # torch's, which gathers what went wrong on all ranks
                raise OSError(str(error)) from error

    def _needed_bytes(self) -> int:
        """Return the size of the weights, and of the masters and both moments in float32; the rest is small."""
        item_bytes = 4 if self._config.precision == "fp32" else 2
        return (item_bytes + 3 * 4) * load_architecture(self._config.model).num_parameters

    def _layout(self) -> dict[str, int]:
        parallel = self._config.parallel.model_dump(exclude={"overlap"})
        return {**parallel, "world_size": self._world_size}

    def _check_together(self, folder: Path) -> Manifest:
        """Check this rank's share of the files. What one rank finds wrong is raised on every rank."""
        manifest, failure = None, None
        try:
            manifest = check(folder, self._rank, self._world_size)
        except CheckpointError as error:
            failure = error
        found = gather_json(dataclasses.asdict(Finding.of(failure, self._rank)), self._group)
        if (reason := verdict([Finding(**it) for it in found])) is not None:
            raise reason
        return cast(Manifest, manifest)

    def _on_rank_zero(self, work: Callable[[], object]) -> None:
        self._together(lambda: work() if self._rank == 0 else None)

    def _together[T](self, work: Callable[[], T]) -> T:
        """Return what `work` gives on this rank. A CheckpointError on one rank is raised on every rank."""
        return on_all_ranks(work, self._group, expected=CheckpointError)

"""Plan which checkpoint a run continues from: its own newest one, one that the user names, or none.

`run_dir/checkpoints/resumed_from` holds one line: the folder that the user named when the run was last resumed. A
launcher repeats the command after a preemption; the file tells that from a wish to go back to the named checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_a3po.checkpoint.store import checkpoint_folders
from megatron_a3po.errors import CheckpointError, ConfigError
from megatron_a3po.runtime.files import write_durably
from megatron_a3po.runtime.manifest import read_manifest, step_of
from megatron_a3po.runtime.run_dir import CONFIG_FILE, METRICS_FILE, refuse_other_config, refuse_used_run_dir

Resume = Literal["auto", "none"] | Path
_ORIGIN_FILE = "resumed_from"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePlan:
    """The checkpoints to try, in this order; only a check of their files tells which one is valid."""

    candidates: tuple[Path, ...]
    must_resume: bool
    """The user named a checkpoint: the run does not start without a valid one"""


def plan_resume(run_dir: Path, resume: Resume, resolved_config: str) -> ResumePlan:
    """Find the candidates for `resume`. Reads no weights. Raises ConfigError for a `resume` that is not possible.

    If the run was resumed from the path `resume` before, the checkpoints that it has made since then come first. The
    path itself, which retention may have deleted, is the last candidate.
    """
    if resume == "none":
        refuse_used_run_dir(run_dir)
        return ResumePlan(candidates=(), must_resume=False)
    root = run_dir / "checkpoints"
    own, origin = checkpoint_folders(root), _read_origin(root)
    if resume == "auto":
        elsewhere = [origin] if origin is not None and origin.parent != root.resolve() else []
        return ResumePlan(candidates=(*own, *elsewhere), must_resume=False)
    named = resume.resolve()
    newer = [folder for folder in own if named == origin and _is_later(folder, named, root)]
    if not newer:
        _refuse_unusable(resume, named, resolved_config)
        if named.parent != root.resolve() and named != origin:
            _refuse_foreign(run_dir, resume, own)
    return ResumePlan(candidates=(*newer, named), must_resume=True)


def record_origin(run_dir: Path, resume: Resume) -> None:
    """Remember that the run continues from this path. Call it after other checkpoints are set aside."""
    if isinstance(resume, Path):
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        write_durably(run_dir / "checkpoints" / _ORIGIN_FILE, f"{resume.resolve()}\n")


def _read_origin(root: Path) -> Path | None:
    try:
        return Path((root / _ORIGIN_FILE).read_text(encoding="utf-8").strip())
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{root / _ORIGIN_FILE}: cannot be read ({error}); remove or restore it") from None


def _is_later(folder: Path, named: Path, root: Path) -> bool:
    """Tell whether the run made the checkpoint `folder` after it was resumed from `named`."""
    # From elsewhere a run starts in a folder without checkpoints, so all of them came later.
    return named.parent != root.resolve() or (step_of(folder) or 0) > (step_of(named) or 0)


def _refuse_unusable(resume: Path, named: Path, resolved_config: str) -> None:
    try:
        read_manifest(named)
    except CheckpointError as error:
        raise ConfigError(f"resume = {resume}: {error}; or use `resume=auto` or `resume=none`") from None
    what = f"resume = {resume}: the run of this checkpoint"
    refuse_other_config(named / CONFIG_FILE, resolved_config, what)


def _refuse_foreign(run_dir: Path, resume: Path, own: list[Path]) -> None:
    metrics = run_dir / METRICS_FILE
    if own or (metrics.exists() and metrics.stat().st_size > 0):
        raise ConfigError(
            f"resume = {resume}: run_dir = {run_dir} holds a run that did not start from this checkpoint; give a new "
            "folder (`run_dir=...`), or go on with the run that is there (`resume=auto`)"
        )

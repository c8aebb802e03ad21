"""Load the prompts of datasets on the disk."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megatron_a3po.config import HELD_OUT
from megatron_a3po.errors import DataError
from megatron_a3po.prompts.encoder import PromptEncoder
from megatron_a3po.prompts.prompts import Prompt, PromptSet, make_prompt
from megatron_a3po.prompts.rows import make_schema
from megatron_a3po.prompts.scan import RejectedRows, Scan, ScanSettings, scan
from megatron_a3po.prompts.store import QuestionStore
from megatron_a3po.runtime.logging import logger

REJECTED_ROWS = "quarantine.jsonl"
"""File of the rejected rows, in the folder of a run"""
_HELD_OUT_STREAM = 1
"""Separates the random numbers of the split from those of the epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFiles:
    """A dataset on the disk, its columns, and how its questions become prompts."""

    path: Path
    split: str | None = None
    columns: str | Mapping[str, str]
    encoder: PromptEncoder
    num_prompts: int | None = None
    """Upper limit; None: all"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetLimits:
    """Which prompts are left out, and how many rows may be rejected."""

    max_prompt_tokens: int
    vocab_size: int
    """The model's"""
    max_bad_share: float
    """The largest share of rejected rows in a dataset"""


def load_dataset(
    training: DatasetFiles,
    evaluation: Mapping[str, DatasetFiles],
    *,
    run_dir: Path,
    num_held_out: int,
    seed: int,
    order_seed: int,
    limits: DatasetLimits,
) -> PromptSet:
    """Load a dataset for training, and datasets for evaluation, whose prompts are left out of training.

    Args:
        training: the dataset for training; `num_held_out` of its prompts are kept for evaluation.
        evaluation: datasets for evaluation by name.
        run_dir: folder for the file `REJECTED_ROWS`.
        seed: chooses the prompts of evaluations; at least 0.
        order_seed: seeds the order of every training epoch; at least 0.

    Raises:
        DataError: a dataset cannot be read, has too many rejected rows, or gives no prompt.
    """
    with _Reader(run_dir, limits) as reader:
        scanned = reader.read(training)
        held_out, rest = _split(scanned, num_held_out, seed, training.path)
        prompts = {HELD_OUT: reader.prompts(held_out, training.encoder)} if num_held_out else {}
        for name, files in evaluation.items():
            scanned_too = reader.read(files)
            prompts[name] = reader.prompts(_choose(scanned_too.kept, files.num_prompts, seed)[0], files.encoder)
            is_shared = np.isin(scanned.prompt_hashes, scanned_too.prompt_hashes)
            before, rest = len(rest), np.setdiff1d(rest, scanned.kept[is_shared], assume_unique=True)
            if len(rest) < before:
                logger.warning("%d prompts of %s are left out of the training dataset", before - len(rest), name)
        if not len(rest):
            raise DataError(
                f"data.path = {training.path}: all of its prompts are in `evaluation.datasets` too; use another "
                "dataset for training, or for evaluation"
            )
    trained_on = hashlib.blake2b(rest.tobytes(), digest_size=16).hexdigest()
    return PromptSet(
        questions=reader.store,
        training=rest,
        evaluation=prompts,
        encoder=training.encoder,
        order_seed=order_seed,
        fingerprint=f"{scanned.fingerprint} {trained_on}",
        max_tokens=scanned.max_tokens,
    )


def load_evaluation(
    datasets: Mapping[str, DatasetFiles], *, run_dir: Path, seed: int, limits: DatasetLimits
) -> dict[str, list[Prompt]]:
    """Load datasets for evaluation alone, as `load_dataset` does; return their prompts by name. Raises DataError."""
    if not datasets:
        return {}
    with _Reader(run_dir, limits) as reader:
        chosen = {
            name: _choose(reader.read(files).kept, files.num_prompts, seed)[0] for name, files in datasets.items()
        }
        return {name: reader.prompts(indices, datasets[name].encoder) for name, indices in chosen.items()}


class _Reader:
    """Read datasets into one store, with one list of rejected rows. A context manager."""

    def __init__(self, run_dir: Path, limits: DatasetLimits) -> None:
        self.store = QuestionStore(run_dir)
        self._limits = limits
        self._rejected = RejectedRows(run_dir / REJECTED_ROWS)

    def __enter__(self) -> Self:
        self._rejected.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._rejected.__exit__(kind, error, traceback)

    def prompts(self, indices: NDArray[np.int64], encoder: PromptEncoder) -> list[Prompt]:
        return [make_prompt(self.store[int(index)], encoder) for index in indices]

    def read(self, files: DatasetFiles) -> Scan:
        limits, rejected = self._limits, self._rejected
        settings = ScanSettings(
            schema=make_schema(files.columns),
            encoder=files.encoder,
            max_prompt_tokens=limits.max_prompt_tokens,
            vocab_size=limits.vocab_size,
        )
        rejected_before = rejected.counts.total()
        found = scan(files.path, files.split, settings, self.store, rejected)
        num_rejected = rejected.counts.total() - rejected_before
        summary = (
            f"{files.path}: {found.num_rows:,} rows, {len(found.kept):,} prompts; left out: {found.num_repeats:,} "
            f"repeats, {found.num_too_long:,} of over {limits.max_prompt_tokens:,} tokens, {num_rejected:,} rejected"
        )
        if num_rejected:
            summary += f" ({rejected}; see {rejected.path})"
        if num_rejected > limits.max_bad_share * found.num_rows:
            raise DataError(
                f"{summary}. That is more than data.max_bad_share = {limits.max_bad_share:g}; repair the dataset or "
                "its columns, or raise data.max_bad_share"
            )
        if not len(found.kept):
            raise DataError(f"{summary}. No prompt is left; use another dataset, or allow longer prompts")
        logger.info("%s", summary)
        return found


def _split(scanned: Scan, num_held_out: int, seed: int, path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the held-out prompts and of the others. Raises DataError."""
    if num_held_out >= len(scanned.kept):
        raise DataError(
            f"data.path = {path} gives {len(scanned.kept)} prompts, but data.num_held_out = {num_held_out} are for "
            "evaluation, and training needs at least one; lower data.num_held_out, and if it becomes 0, give "
            "`evaluation.datasets`"
        )
    return _choose(scanned.kept, num_held_out, seed)


def _choose(indices: NDArray[np.int64], number: int | None, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose `number` indices at random (None: all). Return those and the others, in the order of the dataset."""
    is_chosen = np.zeros(len(indices), dtype=bool)
    is_chosen[np.random.default_rng((seed, _HELD_OUT_STREAM)).permutation(len(indices))[:number]] = True
    return indices[is_chosen], indices[~is_chosen]

"""Prompts of a dataset on the disk."""

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
from megatron_a3po.prompts.rejected_rows import Quarantine
from megatron_a3po.prompts.rows import make_schema
from megatron_a3po.prompts.scan import Scan, ScanSettings, scan
from megatron_a3po.prompts.store import QuestionStore
from megatron_a3po.runtime.logging import logger

QUARANTINE = "quarantine.jsonl"
"""In the folder of a run: the rows that cannot be used"""
_HELD_OUT_STREAM = 1
"""Keeps the split's random numbers apart from those of the epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFiles:
    """Where a dataset is, which column is what, and how its questions become prompts."""

    path: Path
    split: str | None = None
    columns: str | Mapping[str, str]
    encoder: PromptEncoder
    num_prompts: int | None = None
    """At most so many; None: all"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetLimits:
    """What is left out, and when that is too much."""

    max_prompt_tokens: int
    vocab_size: int
    """Of the model"""
    max_bad_share: float
    """The largest share of unusable rows in a dataset"""


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
    """Read a dataset to train on, and those for evaluation, whose prompts training leaves out.

    Args:
        training: of which `num_held_out` prompts are kept for evaluation.
        evaluation: by name.
        run_dir: gets `QUARANTINE`.
        seed: chooses the prompts of evaluations; at least 0.
        order_seed: of the training's epochs; at least 0.

    Raises:
        DataError: a dataset cannot be read, has too many bad rows, or gives no prompt.
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
            raise DataError(f"data.path = {training.path}: all of its prompts are in `evaluation.datasets` too")
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
    """Prompts of datasets that are only evaluated on, by name; as `load_dataset`. Raises DataError."""
    if not datasets:
        return {}
    with _Reader(run_dir, limits) as reader:
        chosen = {
            name: _choose(reader.read(files).kept, files.num_prompts, seed)[0] for name, files in datasets.items()
        }
        return {name: reader.prompts(indices, datasets[name].encoder) for name, indices in chosen.items()}


class _Reader:
    """Reads datasets into one store, with one quarantine. A context manager."""

    def __init__(self, run_dir: Path, limits: DatasetLimits) -> None:
        self.store = QuestionStore(run_dir)
        self._limits = limits
        self._quarantine = Quarantine(run_dir / QUARANTINE)

    def __enter__(self) -> Self:
        self._quarantine.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._quarantine.__exit__(kind, error, traceback)

    def prompts(self, indices: NDArray[np.int64], encoder: PromptEncoder) -> list[Prompt]:
        return [make_prompt(self.store[int(index)], encoder) for index in indices]

    def read(self, files: DatasetFiles) -> Scan:
        limits, quarantine = self._limits, self._quarantine
        settings = ScanSettings(
            schema=make_schema(files.columns),
            encoder=files.encoder,
            max_prompt_tokens=limits.max_prompt_tokens,
            vocab_size=limits.vocab_size,
        )
        bad_before = quarantine.counts.total()
        found = scan(files.path, files.split, settings, self.store, quarantine)
        num_bad = quarantine.counts.total() - bad_before
        summary = (
            f"{files.path}: {found.num_rows:,} rows, {len(found.kept):,} prompts; left out: {found.num_repeats:,} "
            f"repeats, {found.num_too_long:,} of over {limits.max_prompt_tokens:,} tokens, {num_bad:,} bad ones"
        )
        if num_bad:
            summary += f" ({quarantine}; see {quarantine.path})"
        if num_bad > limits.max_bad_share * found.num_rows:
            raise DataError(
                f"{summary}. That is more than data.max_bad_share = {limits.max_bad_share:g}; repair the dataset or "
                "its columns, or raise data.max_bad_share"
            )
        if not len(found.kept):
            raise DataError(f"{summary}. Nothing is left to sample; use another dataset, or longer prompts")
        logger.info("%s", summary)
        return found


def _split(scanned: Scan, num_held_out: int, seed: int, path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the held-out prompts, and of the others."""
    if num_held_out >= len(scanned.kept):
        raise DataError(
            f"data.path = {path} gives {len(scanned.kept)} prompts, of which data.num_held_out = {num_held_out} are to "
            "be kept for evaluation and at least one must remain for training; lower data.num_held_out, and give "
            "`evaluation.datasets` if it is 0 then"
        )
    return _choose(scanned.kept, num_held_out, seed)


def _choose(indices: NDArray[np.int64], number: int | None, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """So many at random (None: all), and the others, both in the order of the dataset."""
    is_chosen = np.zeros(len(indices), dtype=bool)
    is_chosen[np.random.default_rng((seed, _HELD_OUT_STREAM)).permutation(len(indices))[:number]] = True
    return indices[is_chosen], indices[~is_chosen]

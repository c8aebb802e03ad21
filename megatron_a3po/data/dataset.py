"""Prompts of a dataset on the disk."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_a3po.data.prompts import PromptSet
from megatron_a3po.data.quarantine import Quarantine
from megatron_a3po.data.questions import PromptEncoder
from megatron_a3po.data.rows import make_schema
from megatron_a3po.data.scan import Scan, ScanSettings, scan
from megatron_a3po.data.store import QuestionStore
from megatron_a3po.errors import DataError
from megatron_a3po.runtime.logging import logger

_HELD_OUT_STREAM = 1
"""Keeps the split's random numbers apart from those of the epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFiles:
    """Where a dataset is, and which column is what."""

    path: Path
    split: str | None = None
    columns: str | Mapping[str, str]


def load_dataset(
    training: DatasetFiles,
    held_out: DatasetFiles | None,
    *,
    run_dir: Path,
    encoder: PromptEncoder,
    num_held_out: int,
    seed: int,
    order_seed: int,
    max_prompt_tokens: int,
    vocab_size: int,
    max_bad_share: float,
) -> PromptSet:
    """Read a dataset, and the one for evaluation if it is another one.

    Args:
        training: what is trained on; without `held_out`, `num_held_out` of its prompts are kept for evaluation.
        held_out: of which `num_held_out` prompts, or all, are sampled in evaluations. Training leaves out all of them.
        run_dir: gets `quarantine.jsonl` and `data.json`, which knows a changed dataset when the run is resumed.
        seed: chooses the held-out prompts; at least 0.
        order_seed: of the training's epochs; at least 0.
        max_prompt_tokens: longer prompts are left out.
        vocab_size: of the model.
        max_bad_share: the largest share of unusable rows in a dataset.

    Raises:
        DataError: the dataset cannot be read, has too many bad rows, gives no prompt, or is not that of `data.json`.
    """
    store = QuestionStore(run_dir)
    loader = _Loader(store, encoder, max_prompt_tokens, vocab_size, max_bad_share)
    with Quarantine(run_dir / "quarantine.jsonl") as quarantine:
        scanned = loader.read(training, quarantine)
        evaluated = loader.read(held_out, quarantine) if held_out is not None else None
    if evaluated is None:
        _check_enough(scanned, num_held_out, training.path)
        chosen, rest = _choose(scanned.kept, num_held_out, seed)
    else:
        chosen, _ = _choose(evaluated.kept, min(num_held_out, len(evaluated.kept)), seed)
        shared = np.isin(scanned.prompt_hashes, evaluated.prompt_hashes)
        rest = scanned.kept[~shared]
        if shared.any():
            logger.warning("%d prompts for evaluation are left out of the training dataset", int(shared.sum()))
        if not len(rest):
            raise DataError(f"data.path = {training.path}: all of its prompts are in {held_out and held_out.path} too")
    fingerprints = [part.fingerprint for part in (scanned, evaluated) if part is not None]
    _check_unchanged(run_dir / "data.json", {"prompts": len(rest), "held_out": len(chosen), "content": fingerprints})
    return PromptSet(
        questions=store,
        training=rest,
        held_out=[store[int(index)] for index in chosen],
        encoder=encoder,
        order_seed=order_seed,
    )


class _Loader:
    """Reads datasets into one store."""

    def __init__(
        self,
        store: QuestionStore,
        encoder: PromptEncoder,
        max_prompt_tokens: int,
        vocab_size: int,
        max_bad_share: float,
    ) -> None:
        self._store = store
        self._encoder = encoder
        self._max_prompt_tokens = max_prompt_tokens
        self._vocab_size = vocab_size
        self._max_bad_share = max_bad_share

    def read(self, files: DatasetFiles, quarantine: Quarantine) -> Scan:
        settings = ScanSettings(
            schema=make_schema(files.columns),
            encoder=self._encoder,
            max_prompt_tokens=self._max_prompt_tokens,
            vocab_size=self._vocab_size,
        )
        bad_before = quarantine.counts.total()
        found = scan(files.path, files.split, settings, self._store, quarantine)
        num_bad = quarantine.counts.total() - bad_before
        summary = (
            f"{files.path}: {found.num_rows:,} rows, {len(found.kept):,} prompts; left out: {found.num_repeats:,} "
            f"repeats, {found.num_too_long:,} of over {self._max_prompt_tokens:,} tokens, {num_bad:,} bad ones"
        )
        if num_bad:
            summary += f" ({quarantine}; see {quarantine.path})"
        if num_bad > self._max_bad_share * found.num_rows:
            raise DataError(
                f"{summary}. That is more than data.max_bad_share = {self._max_bad_share:g}; repair the dataset or "
                "data.columns, or raise data.max_bad_share"
            )
        if not len(found.kept):
            raise DataError(f"{summary}. Nothing is left to sample; use another dataset, or longer prompts")
        logger.info("%s", summary)
        return found


def _check_enough(scanned: Scan, num_held_out: int, path: Path) -> None:
    if num_held_out >= len(scanned.kept):
        raise DataError(
            f"data.path = {path} gives {len(scanned.kept)} prompts, of which data.num_held_out = {num_held_out} are to "
            "be kept for evaluation and at least one must remain for training; lower data.num_held_out, or give "
            "data.held_out_path"
        )


def _choose(indices: NDArray[np.int64], number: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """So many at random, and the others, both in the order of the dataset."""
    is_chosen = np.zeros(len(indices), dtype=bool)
    is_chosen[np.random.default_rng((seed, _HELD_OUT_STREAM)).permutation(len(indices))[:number]] = True
    return indices[is_chosen], indices[~is_chosen]


def _check_unchanged(path: Path, found: dict[str, Any]) -> None:
    """A resumed run goes on with the numbers of its prompts, which mean others in another dataset."""
    if not path.exists():
        path.write_text(json.dumps(found) + "\n", encoding="utf-8")
        return
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; remove it if the dataset is the same as before") from error
    if known != found:
        raise DataError(
            f"the dataset is not the one that this run was started with: {known} before, {found} now ({path}); restore "
            "it, or start a new run (`run_dir=...`)"
        )

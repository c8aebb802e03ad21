"""Runs every case of the parity matrix, and every conversion, and writes docs/parity.md: `make parity`."""

import sys
import tempfile
import time
from pathlib import Path

from tests.distributed.conversion_cases import ALL as CONVERSIONS
from tests.distributed.conversion_cases import ALL_ON_MANY_RANKS, run_conversions, run_conversions_in_turn
from tests.distributed.launch import ROOT
from tests.distributed.parity import LIMITS, WORLD_SIZE, Case, Difference, layout_title, run_parity
from tests.distributed.parity_cases import ALL
from tests.distributed.test_parity import CASES_PER_START

_HEAD = f"""# Parity: the actor in every layout against Hugging Face

Written by `make parity`. Each row is the real actor on {WORLD_SIZE} CPU ranks (gloo, float32) beside plain PyTorch and
`torch.optim.AdamW` on the same Hugging Face model: two training steps on 32 ragged trajectories in packed microbatches,
every response token with a staleness of its own from 0 to 3. Shown are the largest absolute differences over both steps
and all elements of all tensors: of the loss (and entropy and KL), of the unclipped gradient, of the weights after the
step, whose learning rate is 2e-4. `make test` runs one row of each kind.

TP: tensor parallel with sequence parallelism. PP: pipeline stages, 1F1B. VPP: chunks per stage, interleaved. CP:
context parallel. EP: expert parallel. DP: data parallel, with the distributed optimizer in every row.

| model and layout | microbatches | loss | gradients | weights |
|---|---|---|---|---|
"""

_CONVERSION_HEAD = """
## Conversion

Four processes convert a Hugging Face folder to Megatron's weights; a run in the layout starts from them and saves a
checkpoint; they convert that back to a Hugging Face folder. Layouts of eight and sixteen ranks are those of one process
that is each rank in turn, with process groups in which nobody answers: each builds its part of the model and loads it
as a run does, and writes what Megatron says is its own to write; Megatron's check that all ranks together hold every
element once is made over what they held. Training in these layouts is not compared.

| model | layouts of the checkpoint | of more ranks, in turn | tensors in which any bit differs |
|---|---|---|---|
"""


def main() -> int:
    """0 if every case is within the limits."""
    rows, failed = [], 0
    for start in range(0, len(ALL), CASES_PER_START):
        cases = ALL[start : start + CASES_PER_START]
        begun = time.monotonic()
        for case, difference in zip(cases, run_parity(cases, timeout_seconds=900), strict=True):
            exceeded = [name for name, limit in LIMITS.items() if not getattr(difference, name) <= limit]
            failed += bool(exceeded)
            rows.append(_row(case, difference))
            print(rows[-1] + (f" OVER THE LIMIT: {exceeded}" if exceeded else ""), flush=True)
        print(f"{start + len(cases)} of {len(ALL)} cases, {time.monotonic() - begun:.0f} s", flush=True)
    limits = ", ".join(f"{name} {limit:.0e}" for name, limit in LIMITS.items())
    conversions, different = _conversions()
    text = _HEAD + "\n".join(rows) + f"\n\nLimits: {limits}.\n" + _CONVERSION_HEAD + "\n".join(conversions) + "\n"
    Path(ROOT, "docs", "parity.md").write_text(text, encoding="utf-8")
    return 1 if failed or different else 0


def _conversions() -> tuple[list[str], int]:
    """(rows, how many tensors differed)"""
    with tempfile.TemporaryDirectory() as folder:
        together = run_conversions(CONVERSIONS, Path(folder, "together"), timeout_seconds=2400)
        in_turn = run_conversions_in_turn(ALL_ON_MANY_RANKS, Path(folder, "in_turn"), timeout_seconds=600)
    rows = []
    for family in CONVERSIONS:
        cases = [[case for case in found if case["family"] == family] for found in (together, in_turn)]
        layouts = [", ".join(layout_title(case["layout"]) for case in some) for some in cases]
        different = sum(len(case["different"]) for some in cases for case in some)
        rows.append(f"| {family} | {' | '.join(layouts)} | {different} |")
        print(rows[-1], flush=True)
    return rows, sum(len(case["different"]) for case in together + in_turn)


def _row(case: Case, difference: Difference) -> str:
    values = (difference.loss, difference.gradients, difference.weights)
    numbers = " | ".join(f"{value:.1e}" for value in values)
    return f"| {case.title.replace(' | ', ', ')} | {difference.num_microbatches} | {numbers} |"


if __name__ == "__main__":
    sys.exit(main())

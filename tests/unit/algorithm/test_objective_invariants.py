"""What may not change the objective: masked positions, broken tokens, padding, and the split into microbatches."""

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from megatron_a3po.algorithm.diagnostics import combine_numbers
from megatron_a3po.batching.packing import pack
from megatron_a3po.types import Alignment
from tests.support.objective_run import (
    ADVANTAGES,
    EVERYTHING,
    METHODS,
    SHAPES,
    batch,
    objective,
    run,
    trajectories,
    without,
)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_garbage_in_masked_positions_leaves_loss_gradients_and_report_bit_identical(
    method: str, garbage: float, level: str
) -> None:
    microbatch, logprobs, entropy = batch()
    masked = ~microbatch.loss_mask
    names = ("behaviour_logprobs", "advantages", "recomputed_logprobs", "reference_logprobs")
    dirty: dict[str, Any] = {name: torch.where(masked, garbage, getattr(microbatch, name)) for name in names}
    dirty["weight_versions"] = torch.where(masked, 10_000, microbatch.weight_versions)
    loss = objective(method, ratio_level=level, weight_cap_level=level, **EVERYTHING)
    clean = run(loss, microbatch, logprobs, entropy)
    result = run(
        loss,
        dataclasses.replace(microbatch, **dirty),
        torch.where(masked, garbage, logprobs),
        torch.where(masked, garbage, entropy),
    )

    assert torch.equal(result.loss, clean.loss) and bool(clean.loss.isfinite())
    assert torch.equal(result.on_logprobs, clean.on_logprobs)
    assert result.on_entropy is not None and clean.on_entropy is not None
    assert torch.equal(result.on_entropy, clean.on_entropy)
    assert not result.on_logprobs[masked].any() and not result.on_entropy[masked].any()
    assert result.report == clean.report


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("field", ["logprobs", "entropy", "behaviour_logprobs", "reference_logprobs"])
def test_a_loss_token_that_is_not_finite_anywhere_spoils_no_other(field: str, value: float) -> None:
    microbatch, logprobs, entropy = batch()
    position = int(microbatch.loss_mask.nonzero()[4])
    tensors = {"logprobs": logprobs, "entropy": entropy}
    if field in tensors:
        tensors[field][position] = value
    else:
        getattr(microbatch, field)[position] = value
    result = run(objective("loglinear", **EVERYTHING), microbatch, **tensors)
    others = torch.arange(len(logprobs)) != position
    expected = run(objective("loglinear", **EVERYTHING), *batch())

    assert bool(result.loss.isfinite()) and bool(result.on_logprobs.isfinite().all())
    assert torch.equal(result.on_logprobs[others], expected.on_logprobs[others])
    assert all(math.isfinite(metric) for metric in result.metrics.values())
    assert result.metrics["nonfinite_tokens"] == (field in ("logprobs", "behaviour_logprobs"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("cuts", [[0, 2, 5], [0, 1, 2, 3, 4, 5]])
def test_the_sums_over_any_split_into_microbatches_equal_the_whole(method: str, level: str, cuts: list[int]) -> None:
    whole, logprobs, entropy = batch(multiple_of=1)
    loss = objective(method, ratio_level=level, weight_cap_level=level, **EVERYTHING)
    expected = run(loss, whole, logprobs, entropy)
    bounds, sequences, results = whole.cu_seqlens.tolist(), trajectories(), []
    for first, last in pairwise(cuts):
        tokens = slice(bounds[first], bounds[last])
        assert whole.recomputed_logprobs is not None and whole.reference_logprobs is not None
        part = dataclasses.replace(
            pack(
                sequences[first:last],
                ADVANTAGES[first:last],
                alignment=Alignment(rank_multiple=1),
                device=torch.device("cpu"),
            ),
            recomputed_logprobs=whole.recomputed_logprobs[tokens],
            reference_logprobs=whole.reference_logprobs[tokens],
        )
        results.append(run(loss, part, logprobs[tokens], entropy[tokens]))

    torch.testing.assert_close(torch.stack([result.loss for result in results]).sum(), expected.loss)
    torch.testing.assert_close(torch.cat([result.on_logprobs for result in results]), expected.on_logprobs)
    combined = combine_numbers([result.report for result in results])
    assert combined.sums == pytest.approx(expected.report.sums, rel=1e-5, abs=1e-5)
    assert combined.maxima == expected.report.maxima


@pytest.mark.parametrize("method", METHODS)
def test_a_microbatch_of_padding_only_has_a_loss_of_zero_with_a_graph(method: str) -> None:
    empty = pack([], torch.zeros(0), alignment=Alignment(rank_multiple=4), device=torch.device("cpu"))
    nothing = torch.full((4,), math.nan)
    microbatch = dataclasses.replace(empty, recomputed_logprobs=nothing, reference_logprobs=nothing)
    result = run(objective(method, ratio_level="sequence", **EVERYTHING), microbatch, nothing, nothing)

    assert result.loss.item() == 0.0
    assert result.on_logprobs.tolist() == [0.0] * 4
    assert not any([*result.report.sums.values(), *result.report.maxima.values()])


def test_a_padding_sequence_is_no_part_of_any_other() -> None:
    loss = objective("loglinear", ratio_level="sequence", weight_cap_level="sequence")
    padded, logprobs, entropy = batch(multiple_of=64)
    tokens = sum(prompt + response - 1 for prompt, response in SHAPES)
    bare = dataclasses.replace(batch(multiple_of=1)[0], recomputed_logprobs=None, reference_logprobs=None)
    with_padding = run(loss, without(padded, "recomputed_logprobs", "reference_logprobs"), logprobs, entropy)
    alone = run(loss, bare, logprobs[:tokens], entropy[:tokens])

    assert len(padded.labels) == 64 > tokens
    assert torch.equal(with_padding.loss, alone.loss)
    assert torch.equal(with_padding.on_logprobs[:tokens], alone.on_logprobs)

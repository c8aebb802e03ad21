"""Megatron's weights load in any layout, and come back from a checkpoint that was saved in it."""

from pathlib import Path

import pytest

from tests.distributed.conversion_cases import (
    REPRESENTATIVE,
    REPRESENTATIVE_ON_MANY_RANKS,
    run_conversions,
    run_conversions_in_turn,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_bit_comes_back_through_a_checkpoint_of_any_layout(tmp_path: Path) -> None:
    """Four processes convert a Hugging Face folder; a run in the layout starts from it and saves; they convert back."""
    found = run_conversions(REPRESENTATIVE, tmp_path, timeout_seconds=800)

    assert len(found) == sum(map(len, REPRESENTATIVE.values()))
    assert [case for case in found if case["different"]] == []


def test_every_bit_comes_back_through_a_layout_of_sixteen_ranks(tmp_path: Path) -> None:
    """One process is each of them in turn: what each loads and holds is the real thing, with no collective."""
    found = run_conversions_in_turn(REPRESENTATIVE_ON_MANY_RANKS, tmp_path, timeout_seconds=300)

    assert len(found) == sum(map(len, REPRESENTATIVE_ON_MANY_RANKS.values()))
    assert [case for case in found if case["different"]] == []

"""Megatron's weights load in any layout, and come back from a checkpoint that was saved in it."""

from pathlib import Path

import pytest

from tests.distributed.conversion_cases import REPRESENTATIVE, run_conversions

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_bit_comes_back_through_a_checkpoint_of_any_layout(tmp_path: Path) -> None:
    """Four processes convert a Hugging Face folder; a run in the layout starts from it and saves; they convert back."""
    found = run_conversions(REPRESENTATIVE, tmp_path, timeout_seconds=800)

    assert len(found) == sum(map(len, REPRESENTATIVE.values()))
    assert [case for case in found if case["different"]] == []

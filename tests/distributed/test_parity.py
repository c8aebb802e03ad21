"""Training steps of the real actor against plain PyTorch on the Hugging Face model, one case of each kind."""

import pytest

from tests.distributed.parity import LIMITS, Case, Difference, run_parity
from tests.distributed.parity_cases import REPRESENTATIVE

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def differences() -> dict[str, Difference]:
    found = run_parity(REPRESENTATIVE, timeout_seconds=840)
    return {case.title: difference for case, difference in zip(REPRESENTATIVE, found, strict=True)}


@pytest.mark.parametrize("case", REPRESENTATIVE, ids=lambda case: case.title)
def test_loss_gradients_and_weights_equal_hugging_face_and_adamw(
    case: Case, differences: dict[str, Difference]
) -> None:
    for name, limit in LIMITS.items():
        assert getattr(differences[case.title], name) <= limit, name


def test_the_cases_split_the_batch_in_different_ways(differences: dict[str, Difference]) -> None:
    assert len({difference.num_microbatches for difference in differences.values()}) >= 3

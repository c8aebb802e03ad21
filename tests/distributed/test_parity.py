"""Training steps of the real actor against plain PyTorch on the Hugging Face model, one case of each kind."""

import pytest

from tests.distributed.parity import LIMITS, Case, Difference, run_parity
from tests.distributed.parity_cases import ALL, REPRESENTATIVE

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

CASES_PER_START = 12


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


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, len(ALL), CASES_PER_START))
def test_every_row_of_the_matrix_is_within_the_limits(first: int) -> None:
    cases = [case for case in ALL[first : first + CASES_PER_START] if case not in REPRESENTATIVE]
    found = run_parity(cases, timeout_seconds=840)
    exceeded = {
        f"{case.title}: {name}": getattr(difference, name)
        for case, difference in zip(cases, found, strict=True)
        for name, limit in LIMITS.items()
        if not getattr(difference, name) <= limit
    }
    assert exceeded == {}

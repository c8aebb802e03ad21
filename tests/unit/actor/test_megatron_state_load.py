"""What Transformer Engine asks for before it loads the scales of an FP8 run."""

import os

import pytest

from megatron_a3po import cpu

NAME = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_pickled_scales_are_allowed_while_a_checkpoint_is_loaded_and_not_afterwards(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu.install()
    from megatron_a3po.actor.megatron_state import _pickled_extra_state

    if before is None:
        monkeypatch.delenv(NAME, raising=False)
    else:
        monkeypatch.setenv(NAME, before)
    seen = []

    def load() -> None:
        with _pickled_extra_state():
            seen.append(os.getenv(NAME, "0"))
            raise RuntimeError("damaged")

    with pytest.raises(RuntimeError, match="damaged"):
        load()
    assert seen == ["1"]
    assert os.environ.get(NAME) == before

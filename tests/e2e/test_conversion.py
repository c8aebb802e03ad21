"""What the conversion tools need of a machine. What they write is in test_example.py and tests/distributed."""

from pathlib import Path

import pytest

from tools.benchmark_conversion import run_tool, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(600)]


def test_the_memory_of_a_conversion_does_not_grow_with_the_model(tmp_path: Path) -> None:
    peaks: dict[str, list[float]] = {}
    for layers in (1, 8):
        folders = [tmp_path / f"{kind}{layers}" for kind in ("hf", "megatron", "back")]
        num_parameters = write_model(folders[0], layers, vocabulary=8192)
        for tool, source, target in zip(
            ("convert_hf_to_megatron.py", "convert_megatron_to_hf.py"), folders, folders[1:], strict=False
        ):
            peaks.setdefault(tool, []).append(run_tool(tool, 1, str(source), str(target))[0])
    assert num_parameters * 2 > 0.9 * 2**30, "the larger model weighs more than the limit below by far"
    for tool, (small, large) in peaks.items():
        assert large - small <= 0.2, f"{tool}: {small} and {large} GiB"

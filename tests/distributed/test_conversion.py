"""Megatron's weights load in any layout, and come back from a checkpoint that was saved in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.conversion_cases import (
    ALL,
    ALL_ON_MANY_RANKS,
    REPRESENTATIVE,
    REPRESENTATIVE_ON_MANY_RANKS,
    differing_tensors,
    run_conversions,
    run_conversions_in_turn,
)
from tests.distributed.launch import RANK_ENVIRONMENT, ROOT
from tests.support.deadlines import scaled
from tests.support.tiny_models import save_tiny_model

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


@pytest.mark.nightly
@pytest.mark.parametrize("family", ALL)
def test_every_bit_of_every_family_comes_back_through_every_layout(family: str, tmp_path: Path) -> None:
    found = run_conversions({family: ALL[family]}, tmp_path / "together", timeout_seconds=800)
    found += run_conversions_in_turn({family: ALL_ON_MANY_RANKS[family]}, tmp_path / "in_turn", timeout_seconds=300)

    assert len(found) == len(ALL[family]) + len(ALL_ON_MANY_RANKS[family])
    assert [case for case in found if case["different"]] == []


def test_in_an_environment_for_gpus_without_a_gpu_transformer_engine_is_not_touched(tmp_path: Path) -> None:
    save_tiny_model("qwen3_moe", tmp_path / "hf")
    package, metadata = tmp_path / "transformer_engine", tmp_path / "transformer_engine-2.20.2.dist-info" / "METADATA"
    for file in (package / "__init__.py", package / "pytorch" / "__init__.py"):
        file.parent.mkdir()
        file.write_text("raise RuntimeError('TransformerEngine needs CUDA.')\n")
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n")
    paths = f"{tmp_path}:{ROOT}"
    environment = os.environ | RANK_ENVIRONMENT | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    del environment["MASTER_ADDR"]
    for tool, source, target, *options in (
        ("convert_hf_to_megatron.py", "hf", "megatron", "--verify"),
        ("convert_megatron_to_hf.py", "megatron", "back"),
    ):
        command = [sys.executable, str(ROOT / "tools" / tool), str(tmp_path / source), str(tmp_path / target), *options]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=scaled(200), check=False, env=environment
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert not options or ("equal bit by bit" in result.stdout and "logits of" in result.stdout)
    assert differing_tensors(tmp_path / "hf", tmp_path / "back") == []

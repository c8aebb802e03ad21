"""Conversion where Transformer Engine's modules give the parameters their names, and the GPU the logits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT
from tests.gpu.environment import needs_gpus
from tests.support.deadlines import scaled
from tests.support.tiny_models import save_tiny_model

pytestmark = needs_gpus(1)


def convert(tool: str, source: Path, target: Path, **environment: str) -> str:
    """What a verified conversion said."""
    command = [sys.executable, str(ROOT / "tools" / tool), str(source), str(target), "--verify"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=scaled(200), check=False, env=os.environ | environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": ""}], ids=["with the GPU", "without a GPU"])
def test_conversion_both_ways_loses_no_bit_and_the_logits_agree(environment: dict[str, str], tmp_path: Path) -> None:
    save_tiny_model("qwen3", tmp_path / "hf")
    for tool, source, target in (
        ("convert_hf_to_megatron.py", "hf", "megatron"),
        ("convert_megatron_to_hf.py", "megatron", "back"),
    ):
        said = convert(tool, tmp_path / source, tmp_path / target, **environment)
        assert "equal bit by bit" in said and "logits of" in said

"""Conversion where Transformer Engine's modules give the parameters their names, and the GPU the logits."""

import subprocess
import sys
from pathlib import Path

from tests.distributed.launch import ROOT
from tests.gpu.environment import needs_gpus
from tests.tiny_models import save_tiny_model

pytestmark = needs_gpus(1)


def test_conversion_both_ways_loses_no_bit_and_the_logits_agree(tmp_path: Path) -> None:
    save_tiny_model("qwen3", tmp_path / "hf")
    for tool, source, target in (
        ("convert_hf_to_megatron.py", "hf", "megatron"),
        ("convert_megatron_to_hf.py", "megatron", "back"),
    ):
        folders = [str(tmp_path / source), str(tmp_path / target)]
        command = [sys.executable, str(ROOT / "tools" / tool), *folders, "--verify"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "equal bit by bit" in result.stdout and "logits of" in result.stdout

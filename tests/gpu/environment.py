"""What this machine offers to the tests of this folder. Importing it starts nothing on a GPU."""

import importlib.util

import pytest
import torch

from megatron_a3po.actor.fusions import detect_fusions
from megatron_a3po.actor.precision import FP8_RECIPES

NUM_GPUS = torch.cuda.device_count()
HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None


def needs_gpus(count: int, *, transformer_engine: bool = True) -> list[pytest.MarkDecorator]:
    """Marks of a test that takes so many GPUs."""
    installed = HAS_TRANSFORMER_ENGINE or not transformer_engine
    missing = f"needs {count} CUDA devices" if count > 1 else "needs a CUDA device"
    if count <= NUM_GPUS:
        missing = "needs Transformer Engine: make test-gpu"
    return [
        pytest.mark.gpu if count == 1 else pytest.mark.multi_gpu,
        pytest.mark.skipif(count > NUM_GPUS or not installed, reason=missing),
        pytest.mark.timeout(600),
    ]


def recipe_runs(recipe: str) -> bool:
    """Whether this machine's first GPU and its Transformer Engine have the FP8 recipe."""
    installed = detect_fusions().transformer_engine
    if NUM_GPUS == 0 or installed is None:
        return False
    needed = FP8_RECIPES[recipe]
    return needed.runs_on(torch.cuda.get_device_capability()) and installed >= needed.transformer_engine

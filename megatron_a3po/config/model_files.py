"""The two kinds of folder that a run can start from. Imports no torch."""

from pathlib import Path

MEGATRON_WEIGHTS = "weights"
"""Beside config.json and the tokenizer: a checkpoint in Megatron's torch_dist format, instead of safetensors."""


def has_megatron_weights(model: Path) -> bool:
    """Whether the folder is one that `tools/convert_hf_to_megatron.py` makes."""
    return any((model / MEGATRON_WEIGHTS / name).exists() for name in (".metadata", "manifest.json"))

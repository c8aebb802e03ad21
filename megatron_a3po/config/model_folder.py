"""The two kinds of folder that a run can start from. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from megatron_a3po.errors import ConfigError

MEGATRON_WEIGHTS = "weights"
"""Beside config.json and the tokenizer: a checkpoint in Megatron's torch_dist format, instead of safetensors."""


class UnreadableModel(ConfigError):
    """A folder whose config.json is missing or no description of a model."""

    def __init__(self, folder: Path, problem: str, remedy: str) -> None:
        super().__init__(f"{folder}: {problem}; {remedy}")
        self.problem = problem
        self.remedy = remedy


def read_model_config(folder: Path) -> dict[str, Any]:
    """What config.json says. Raises UnreadableModel."""
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "give a Hugging Face model folder: docs/production.md downloads some, and tools/make_tiny_model.py "
        remedy += "makes a tiny one"
        raise UnreadableModel(folder, "no config.json there", remedy) from None
    except (OSError, ValueError, RecursionError) as error:
        problem = f"its config.json cannot be read ({error})"
        raise UnreadableModel(folder, problem, "copy or download it again") from None
    if not isinstance(described, dict):
        raise UnreadableModel(folder, "its config.json does not describe a model", "copy or download it again")
    return described


def has_megatron_weights(model: Path) -> bool:
    """Whether the folder is one that `tools/convert_hf_to_megatron.py` makes."""
    return any((model / MEGATRON_WEIGHTS / name).exists() for name in (".metadata", "manifest.json"))

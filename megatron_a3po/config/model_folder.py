"""The two kinds of model folder that a run can start from. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from megatron_a3po.errors import ConfigError

MEGATRON_WEIGHTS = "weights"
"""Subfolder with a checkpoint in Megatron's torch_dist format, which replaces the safetensors files."""


class UnreadableModel(ConfigError):
    """Error: the config.json of a folder is missing or does not describe a model."""

    def __init__(self, folder: Path, problem: str, remedy: str) -> None:
        super().__init__(f"{folder}: {problem}; {remedy}")
        self.problem = problem
        self.remedy = remedy


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json. Raises UnreadableModel."""
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "give a Hugging Face model folder; docs/production.md has download commands, and "
        remedy += "tools/make_tiny_model.py makes a tiny model"
        raise UnreadableModel(folder, "no config.json there", remedy) from None
    except (OSError, ValueError, RecursionError) as error:
        problem = f"its config.json cannot be read ({error})"
        raise UnreadableModel(folder, problem, "copy or download it again") from None
    if not isinstance(described, dict):
        raise UnreadableModel(folder, "its config.json does not describe a model", "copy or download it again")
    return described


def has_megatron_weights(model: Path) -> bool:
    """Return whether the folder holds weights converted by `tools/convert_hf_to_megatron.py`."""
    return any((model / MEGATRON_WEIGHTS / name).exists() for name in (".metadata", "manifest.json"))

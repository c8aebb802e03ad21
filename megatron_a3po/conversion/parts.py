"""Describe the models that can be converted, and divide their parts among files; for both directions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_a3po.config.model_folder import read_model_config
from megatron_a3po.errors import ConfigError
from megatron_a3po.preflight.families import read_architecture
from megatron_a3po.preflight.variants import unbuilt_variants
from megatron_a3po.weights.hf_mapping import HfMapping, Part, build_hf_mapping


def describe_model(model: Path) -> HfMapping:
    """Map the parameters of the model that config.json describes. Raises ConfigError if it cannot be built."""
    described = read_model_config(model)
    _refuse_unsupported(described, model)
    try:
        mapping = build_hf_mapping(model)
        for part in mapping.parts:
            mapping.hf_shapes(part)
        return mapping
    except Exception as error:  # transformers, megatron-bridge and Megatron each have their own way to refuse
        raise ConfigError(
            f"{model / 'config.json'}: no model can be built from it ({type(error).__name__}: {error}); copy it again"
        ) from error


def _refuse_unsupported(described: Mapping[str, Any], model: Path) -> None:
    """Raise ConfigError for a model that would be built wrongly."""
    try:
        read_architecture(dict(described))
    except ConfigError as error:
        raise ConfigError(f"{model / 'config.json'}: {error}") from None
    variants = [
        f"{field} = {value!r} (it would be built with {built})"
        for field, value, built in unbuilt_variants(dict(described))
    ]
    if variants:
        raise ConfigError(f"{model / 'config.json'}: not supported: {'; '.join(variants)}; use another model")


def split_parts(parts: Sequence[Part], sizes: Mapping[Part, int], limit: int) -> list[list[Part]]:
    """Divide the parts, in their order, into files of at most `limit` bytes; a larger part has its own."""
    files: list[list[Part]] = []
    size = 0
    for part in parts:
        if not files or size + sizes[part] > limit:
            files.append([])
            size = 0
        files[-1].append(part)
        size += sizes[part]
    return files

"""Load a validated `RunConfig` from a YAML file and `key=value` overrides, or report all mistakes in one message."""

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_a3po.config.mistakes import Mistake
from megatron_a3po.config.model_folder import read_model_config
from megatron_a3po.config.schema import RunConfig
from megatron_a3po.config.yaml_files import find_config, parse_overrides, read_yaml, write_yaml
from megatron_a3po.errors import ConfigError
from megatron_a3po.preflight.architecture import Architecture
from megatron_a3po.preflight.check_run import find_mistakes
from megatron_a3po.preflight.families import read_architecture


def load_config(
    path: str | Path, overrides: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> RunConfig:
    """Read a YAML file or a shipped recipe with its `base:` chain, apply `key=value` overrides, and validate.

    The layout is checked against the number of ranks in `environment["WORLD_SIZE"]`, which torchrun sets.
    Raises ConfigError with every mistake and its remedy.
    """
    values, mistakes = read_yaml(find_config(path))
    mistakes += parse_overrides(values, overrides)
    config, more = _validate(values)
    mistakes += more
    if config is not None:
        world_size = environment.get("WORLD_SIZE")
        wrong = {mistake.key for mistake in mistakes}
        found = find_mistakes(config, int(world_size) if world_size else None)
        mistakes += [mistake for mistake in found if not mistake.follows_from(wrong)]
    if mistakes or config is None:
        lines = "".join(f"\n  {index}. {mistake}" for index, mistake in enumerate(mistakes, 1))
        raise ConfigError(f"{path}: {len(mistakes)} mistake{'s' * (len(mistakes) > 1)} in the configuration:{lines}")
    return config


def load_architecture(folder: Path) -> Architecture:
    """Return the architecture of a Hugging Face folder that `load_config` has checked."""
    return read_architecture(read_model_config(folder))


def to_yaml(config: RunConfig) -> str:
    """Return the whole configuration with all defaults as YAML that `load_config` reads back."""
    return write_yaml(config.model_dump(mode="json"))


_STAND_INS: dict[str, Any] = {"model": ".", "run_dir": ".", "num_steps": 1, "data": {"task": "-"}}
"""Values for required keys that are missing or wrong, so that checks across keys still run"""


def _validate(values: dict[str, Any]) -> tuple[RunConfig | None, list[Mistake]]:
    """Return the configuration and its mistakes; wrong entries are replaced, so that later checks still run."""
    try:
        return _parse(values), []
    except ValidationError as error:
        mistakes = _explain(error)
        for item in error.errors():
            _replace(values, _schema_path([str(part) for part in item["loc"]], item["type"]))
    try:
        return _parse(values), mistakes
    except ValidationError:
        return None, mistakes


def _parse(values: dict[str, Any]) -> RunConfig:
    # Strict mode for JSON refuses "60" and true for 60, but accepts a string for a path.
    return RunConfig.model_validate_json(json.dumps(values, default=str), strict=True)


def _explain(error: ValidationError) -> list[Mistake]:
    """Return one mistake per key, although pydantic reports each member of a union."""
    mistakes: dict[str, Mistake] = {}
    for item in error.errors():
        location = [str(part) for part in item["loc"]]
        key = ".".join(_schema_path(location, item["type"]))
        if item["type"] == "extra_forbidden":
            mistakes[key] = Mistake(key, item["input"], "unknown key", _nearest(location))
        elif item["type"] == "missing":
            mistakes[key] = Mistake(key, None, "missing", f"add `{key}: ...` to the file or `{key}=...` to the command")
        elif key in mistakes:
            mistakes[key] = Mistake(key, item["input"], f"{mistakes[key].problem}, or {item['msg'].lower()}", "")
        else:
            mistakes[key] = Mistake(key, item["input"], item["msg"].lower(), "")
    return list(mistakes.values())


def _sections() -> dict[str, type[BaseModel]]:
    fields = RunConfig.model_fields.items()
    return {
        name: field.annotation
        for name, field in fields
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def known_keys() -> list[str]:
    """Return every key of the configuration, with dots."""
    sections = _sections()
    keys = []
    for name in RunConfig.model_fields:
        keys += [f"{name}.{key}" for key in sections[name].model_fields] if name in sections else [name]
    return keys


def _schema_path(location: list[str], error_type: str) -> list[str]:
    """Return the key in pydantic's location, which also names members of unions and indices of lists."""
    if error_type == "extra_forbidden":
        return location
    return location[: 2 if location[0] in _sections() else 1]


def _nearest(location: list[str]) -> str:
    key = ".".join(location)
    same_leaf = [known for known in known_keys() if known.rsplit(".", 1)[-1] == location[-1]]
    near = same_leaf or difflib.get_close_matches(key, [*known_keys(), *_sections()], n=1, cutoff=0.5)
    return f"did you mean `{near[0]}`?" if near else "`--print-config` lists all keys"


def _replace(values: dict[str, Any], key: list[str]) -> None:
    """Replace a wrong entry by a stand-in, or remove it if there is a default."""
    inner: Any = values
    for part in key[:-1]:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner.pop(key[-1], None)
    if key[0] in _STAND_INS and (len(key) == 1 or key == ["data", "task"]):
        values[key[0]] = _STAND_INS[key[0]] if len(key) == 1 else values[key[0]] | _STAND_INS[key[0]]

"""YAML files with `base:` inheritance and `key=value` overrides, read into one nested dictionary and written back."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_a3po.config.mistakes import Mistake
from megatron_a3po.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with two changes: `2e-4` is a number, and a key that occurs twice is an error."""


class _Dumper(yaml.SafeDumper):
    """Write what `_Loader` reads back: the text "2e-4" gets quotes."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            problem = (
                f"the key {key!r} is not text; quote it, or quote the whole value if it looks like `{{{{ name }}}}`"
            )
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} occurs twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$")
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


_PACKAGE = Path(__file__).resolve().parents[1]
_RECIPES = next((folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()), _PACKAGE)
"""Folder of the shipped recipes: inside an installed package, beside it in a checkout."""


def find_config(name: str | Path, folder: Path = Path()) -> Path:
    """Return the file `name` in `folder` if there is one, otherwise the shipped recipe of that name.

    `tiny_cpu`, `tiny_cpu.yaml` and `configs/tiny_cpu.yaml` name the same recipe. A name without a file or a recipe is
    returned as a path in `folder`.
    """
    path = Path(name)
    if not (folder / path).exists() and path.parent in (Path(), Path("configs")):
        recipe = _RECIPES / f"{path.name.removesuffix('.yaml')}.yaml"
        if recipe.exists():
            return recipe
    return folder / path


def read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> tuple[dict[str, Any], list[Mistake]]:
    """Read a file and the chain of files that its `base:` names; values of the outer file win.

    `base:` is a path beside the file or the name of a shipped recipe. Returns the values, and what is wrong with
    `base:`. Raises ConfigError if a file cannot be read.
    """
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `base:` refers back to this file; remove one of the `base:` lines")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        beside = ", ".join(sorted(str(file) for file in path.parent.glob("*.yaml"))) or "no YAML file"
        recipes = ", ".join(sorted(file.stem for file in _RECIPES.glob("*.yaml") if not file.stem.startswith("base")))
        raise ConfigError(
            f"--config {path}: there is no such file; its folder has {beside}; shipped recipes are {recipes}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: contains {type(values).__name__} instead of keys and values")
    base = values.pop("base", None)
    if base is None:
        return values, []
    if not isinstance(base, str):
        return values, [
            Mistake("base", base, "not a path", "name one YAML file, relative to this one, or a shipped recipe")
        ]
    inherited, mistakes = read_yaml(find_config(base, path.parent), (*seen, path.resolve()))
    _merge(inherited, values)
    return inherited, mistakes


def parse_overrides(values: dict[str, Any], overrides: Sequence[str]) -> list[Mistake]:
    """Apply overrides `a.b=value` (value in YAML) to `values` in place; return those that cannot be applied."""
    mistakes = []
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
            mistakes.append(Mistake(override, None, "not of the form key=value", "for example num_steps=10"))
            continue
        try:
            value = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            mistakes.append(Mistake(key, text, f"not valid YAML ({str(error).splitlines()[0]})", "quote the value"))
            continue
        inner = values
        *sections, leaf = key.split(".")
        for section in sections:
            inner = inner.setdefault(section, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict):
            mistakes.append(Mistake(key, text, f"{'.'.join(sections)} is a value, not a section", "check the key"))
            continue
        inner[leaf] = value
    return mistakes


def write_yaml(values: dict[str, Any]) -> str:
    """Return YAML text that `read_yaml` reads back as `values`."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=120)


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    """Merge mappings key by key; null removes an inherited mapping, and a list replaces a list."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif value is None and isinstance(into.get(key), dict):
            del into[key]
        else:
            into[key] = value

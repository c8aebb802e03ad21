"""What docs/production.md and docs/symptoms.md name is there."""

import ast
import re
from pathlib import Path

import yaml

from megatron_a3po.config import RunConfig
from megatron_a3po.config.yaml_files import read_yaml
from tests.support.pages import PAGES, blocks
from tests.support.paths import ROOT

PRODUCTION = "docs/production.md"
COMMANDS = "\n".join(blocks(PRODUCTION, "bash"))


def texts_of_the_code() -> list[str]:
    """String literals, with a gap where a value is put in."""
    found = []
    for path in [*(ROOT / "megatron_a3po").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_quoted_messages_are_those_of_the_code() -> None:
    quoted = re.findall(r"^\| `([^`]+ [^`]+)` \|", PAGES["docs/symptoms.md"], re.MULTILINE)
    texts = texts_of_the_code()

    assert len(quoted) > 20
    assert [message for message in quoted if not any(message in text for text in texts)] == []


def test_every_dataset_and_model_that_recipes_need_is_downloaded() -> None:
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        if file.stem.startswith(("base", "tiny")):
            continue
        values, _ = read_yaml(file)
        config = RunConfig.model_validate(values)
        assert config.model.name.removesuffix("-megatron") in PAGES[PRODUCTION]
        for path in [config.data.path, *(dataset.path for dataset in config.evaluation.datasets.values())]:
            assert path is not None
            assert str(path) in COMMANDS or any(
                f"--local-dir {parent}\n" in COMMANDS for parent in path.parents if str(parent) not in (".", "data")
            )


def test_the_configuration_of_the_page_is_one(tmp_path: Path) -> None:
    (text,) = blocks(PRODUCTION, "yaml")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my.yaml").write_text(text)
    values, mistakes = read_yaml(tmp_path / "my.yaml")
    config = RunConfig.model_validate(values)

    assert mistakes == [] and config.run_dir == Path(yaml.safe_load(text)["run_dir"])

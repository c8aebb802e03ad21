"""What README and the documentation name is there: links, files, keys, commands. `make docs` checks links once more."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from megatron_a3po import __main__ as command_line
from megatron_a3po.config import RunConfig
from megatron_a3po.config.yaml_files import read_yaml
from megatron_a3po.preflight.load import known_keys
from tests.support.pages import PAGES, blocks, prose
from tests.support.paths import ROOT

WRITTEN_BY_HAND = [page for page in PAGES if page not in ("docs/parity.md", "docs/staleness/results.md")]
PRODUCTION = "docs/production.md"
NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(target)
        if page.startswith("docs/") and not file.is_relative_to(ROOT / "docs"):
            broken.append(f"{target} is not on the site")
    assert broken == []


@pytest.mark.parametrize("page", WRITTEN_BY_HAND)
def test_every_file_that_a_page_names_is_in_the_checkout(page: str) -> None:
    named = set(
        re.findall(r"\b(?:megatron_a3po|tools|tests|configs|examples|docker|requirements)/[\w./*-]*\w", PAGES[page])
    )
    assert [name for name in named if not list(ROOT.glob(name))] == []


@pytest.mark.parametrize("page", [page for page in WRITTEN_BY_HAND if page != "CHANGELOG.md"])
def test_every_key_that_a_page_names_is_one_of_the_configuration(page: str) -> None:
    keys = set(known_keys())
    sections = {key.split(".")[0] for key in keys if "." in key}
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_]+)(?=[`:= ])", PAGES[page]))
    assert named - keys == set()


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"[\w/]+\.md", yaml.safe_dump(yaml.safe_load(NAVIGATION)["nav"]))
    assert sorted(f"docs/{page}" for page in listed) == sorted(page for page in PAGES if page.startswith("docs/"))


@pytest.mark.parametrize("page", WRITTEN_BY_HAND)
def test_every_command_of_a_page_is_one(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = "\n".join(blocks(page, "bash"))
    named = re.findall(r"(?:^|\s)make ([a-z-]+)", shown, re.MULTILINE) + re.findall(r"`make ([a-z-]+)", PAGES[page])
    assert [target for target in named if target not in targets] == []
    parser = command_line._parser()
    for line in re.findall(r"python -m megatron_a3po (.*)$", shown.replace("\\\n", ""), re.MULTILINE):
        parser.parse_known_args(shlex.split(line, comments=True))


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_a_picture_of_the_quickstart_is_one_that_the_tool_drew() -> None:
    picture = Path(ROOT, "docs", "images", "quickstart.svg").read_text(encoding="utf-8")
    assert "held-out sampled accuracy" in picture and "http-equiv" not in picture


def test_production_downloads_every_dataset_and_model_that_recipes_need() -> None:
    commands = "\n".join(blocks(PRODUCTION, "bash"))
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        if file.stem.startswith(("base", "tiny")):
            continue
        values, _ = read_yaml(file)
        config = RunConfig.model_validate(values)
        assert config.model.name.removesuffix("-megatron") in PAGES[PRODUCTION]
        for path in [config.data.path, *(dataset.path for dataset in config.evaluation.datasets.values())]:
            assert path is not None
            assert str(path) in commands or any(
                f"--local-dir {parent}\n" in commands for parent in path.parents if str(parent) not in (".", "data")
            )


def test_the_configuration_of_production_is_one(tmp_path: Path) -> None:
    (text,) = blocks(PRODUCTION, "yaml")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my.yaml").write_text(text)
    values, mistakes = read_yaml(tmp_path / "my.yaml")
    config = RunConfig.model_validate(values)

    assert mistakes == [] and config.run_dir == Path(yaml.safe_load(text)["run_dir"])

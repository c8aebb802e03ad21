"""Versions in the images, the requirements, setup.py, the set-up script and the documents agree."""

import re
from pathlib import Path

import pytest

from megatron_a3po import __version__
from tests.support.paths import ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
LOCK = (ROOT / "requirements" / "gpu.lock").read_text(encoding="utf-8")
LOCKED: dict[str, str] = dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", LOCK, re.MULTILINE))
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
SCRIPT = (ROOT / "tools" / "setup_environment.sh").read_text(encoding="utf-8")
NAMED = {
    "SGLang": "sglang",
    "sglang": "sglang",
    "megatron-bridge": "megatron-bridge",
    "Megatron-Core": "megatron-core",
    "megatron-core": "megatron-core",
    "Transformer Engine": "transformer-engine",
    "transformers": "transformers",
    "torch": "torch",
}
"""How documents and code call a package"""


def only(pattern: str, *texts: str) -> str:
    """What the pattern's group is in every one of them."""
    found = {match for text in texts for match in re.findall(pattern, text, re.MULTILINE)}
    assert len(found) == 1, f"{pattern}: {found}"
    return found.pop()


def test_both_images_have_one_base_with_the_cuda_that_torch_is_built_for() -> None:
    texts = [path.read_text(encoding="utf-8") for path in DOCKERFILES]
    assert len(texts) == 2

    cuda = only(r"^FROM nvidia/cuda:(\S+)-cudnn-devel-ubuntu24\.04$", *texts)
    assert cuda.split(".")[:2] == LOCKED["nvidia-cuda-runtime"].split(".")[:2]
    assert LOCKED["nvidia-cudnn-cu13"] and cuda.startswith("13.")


def test_images_and_set_up_script_have_one_uv_and_one_python() -> None:
    texts = [path.read_text(encoding="utf-8") for path in DOCKERFILES]

    assert only(r"astral-sh/uv:(\S+) /uv", *texts) == only(r"^uv_version=(\S+)$", SCRIPT)
    python = only(r'python_requires=">=([\d.]+)"', SETUP)
    assert only(r"\bpython(\d\.\d+)(?:-dev)?\b", *texts) == python
    assert f"Python {python}" in SCRIPT and f"Python {python}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_images_are_tagged_with_the_version_of_the_package() -> None:
    compose = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
    assert only(r"image: a3po-\w+:(\S+)$", compose) == __version__


@pytest.mark.parametrize("file", [*sorted((ROOT / "requirements").glob("*.in")), ROOT / "requirements/overrides.txt"])
def test_the_lock_has_what_the_requirement_files_pin(file: Path) -> None:
    for name, version in re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE):
        assert LOCKED[name] == version


def test_documents_and_code_name_the_locked_versions() -> None:
    pattern = re.compile(rf"\b({'|'.join(NAMED)})(?: |==)(\d+\.\d+\.\d+)\b")
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "megatron_a3po").rglob("*.py")]
    found = [(file, *match) for file in files for match in pattern.findall(file.read_text(encoding="utf-8"))]

    assert len(found) > 5
    assert [entry for entry in found if entry[2] != LOCKED[NAMED[entry[1]]]] == []

"""The requirement files, the two locks, setup.py, the images and the documents name the same versions."""

import re
import runpy

import pytest
import setuptools

from megatron_a3po import __version__
from tests.support.paths import ROOT

REQUIREMENTS = ROOT / "requirements"
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


def requirements(file: str) -> dict[str, str]:
    """Return the name of each requirement in a file with its pinned version, or an empty one."""
    text = (REQUIREMENTS / file).read_text(encoding="utf-8")
    found = re.findall(r"^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?(?:==([^\s;\\]+))?", text, re.MULTILINE)
    return {name.lower(): version for name, version in found if not name.startswith("-")}


CPU, GPU = requirements("cpu.lock"), requirements("gpu.lock")


def test_setup_py_declares_what_the_requirement_files_name(monkeypatch: pytest.MonkeyPatch) -> None:
    declared: dict[str, object] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: declared.update(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    lists = {"trainer": declared["install_requires"], **declared["extras_require"]}
    for name in ("trainer", "rollout", "dev"):
        assert [requirement.lower() for requirement in lists[name]] == list(requirements(f"{name}.in"))


def test_both_locks_have_every_requirement_in_one_version() -> None:
    assert CPU.items() <= GPU.items()
    for file in ("trainer.in", "rollout.in", "dev.in"):
        assert requirements(file).keys() <= CPU.keys()
    for file in (*(path.name for path in REQUIREMENTS.glob("*.in")), "overrides.txt"):
        assert {name: version for name, version in requirements(file).items() if version}.items() <= GPU.items()


@pytest.mark.parametrize("file", ["cpu.lock", "gpu.lock"])
def test_a_lock_names_no_index_and_has_a_hash_for_every_package(file: str) -> None:
    text = (REQUIREMENTS / file).read_text()
    assert not re.search(r"://|--index|--extra-index|--find-links", text)
    packages = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(packages) > 100
    assert all("--hash=sha256:" in package for package in packages)


def test_documents_and_code_name_the_locked_versions() -> None:
    pattern = re.compile(rf"\b({'|'.join(NAMED)})(?: |==)(\d+\.\d+\.\d+)\b")
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "megatron_a3po").rglob("*.py")]
    found = [(file, *match) for file in files for match in pattern.findall(file.read_text(encoding="utf-8"))]

    assert len(found) > 5
    assert [entry for entry in found if entry[2] != GPU[NAMED[entry[1]]]] == []


def test_the_images_have_the_versions_of_the_lock_the_set_up_script_and_the_package() -> None:
    def only(pattern: str, *files: str) -> str:
        texts = [(ROOT / file).read_text(encoding="utf-8") for file in files]
        (found,) = {match for text in texts for match in re.findall(pattern, text, re.MULTILINE)}
        return str(found)

    images = ("docker/trainer.Dockerfile", "docker/rollout.Dockerfile")
    cuda = only(r"^FROM nvidia/cuda:(\d+\.\d+)\.\d+-cudnn-devel-ubuntu24\.04$", *images)
    assert GPU["nvidia-cuda-runtime"].startswith(f"{cuda}.")
    assert only(r"astral-sh/uv:(\S+) /uv", *images) == only(r"^uv_version=(\S+)$", "tools/setup_environment.sh")
    assert only(r"\bpython(\d\.\d+)(?:-dev)?\b", *images) == only(r'python_requires=">=([\d.]+)"', "setup.py")
    assert only(r"image: a3po-\w+:(\S+)$", "docker/compose.yaml") == __version__

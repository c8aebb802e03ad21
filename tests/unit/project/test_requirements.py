"""The requirement files, the two locks and setup.py say the same."""

import re
import runpy

import pytest
import setuptools

from tests.support.paths import ROOT

REQUIREMENTS = ROOT / "requirements"


def requirement_names(file: str) -> list[str]:
    lines = (REQUIREMENTS / file).read_text().splitlines()
    return [match[0].lower() for line in lines if (match := re.match(r"[A-Za-z0-9_-]+", line)) and line[0] != "-"]


def locked_versions(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", (REQUIREMENTS / file).read_text(), re.MULTILINE))


def test_setup_py_declares_what_the_requirement_files_name(monkeypatch: pytest.MonkeyPatch) -> None:
    declared: dict[str, object] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: declared.update(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    lists = {"trainer": declared["install_requires"], **declared["extras_require"]}
    for name in ("trainer", "rollout", "dev"):
        assert [requirement.lower() for requirement in lists[name]] == requirement_names(f"{name}.in")


def test_every_named_requirement_is_in_both_locks_with_one_version() -> None:
    cpu, gpu = locked_versions("cpu.lock"), locked_versions("gpu.lock")
    assert cpu.items() <= gpu.items()
    for file in ("trainer.in", "rollout.in", "dev.in"):
        assert set(requirement_names(file)) <= cpu.keys()


@pytest.mark.parametrize("file", ["cpu.lock", "gpu.lock"])
def test_a_lock_names_no_index_and_has_a_hash_for_every_package(file: str) -> None:
    text = (REQUIREMENTS / file).read_text()
    assert not re.search(r"://|--index|--extra-index|--find-links", text)
    packages = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(packages) > 100
    assert all("--hash=sha256:" in package for package in packages)

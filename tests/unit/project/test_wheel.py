"""What `pip install .` installs is whole, and works outside the checkout."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import megatron_a3po
from tests.support.paths import ROOT
from tests.unit.config.test_config import DESCRIPTION


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the unpacked wheel of a copy of the checkout, built as pip builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    no_caches = shutil.ignore_patterns("__pycache__")
    for name in ("megatron_a3po", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=no_caches)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DESCRIPTION))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    save_file({"weight": torch.zeros(3)}, folder / "model.safetensors")
    return folder


def python(installed: Path, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metadata(installed: Path) -> Distribution:
    (distribution,) = Distribution.discover(name="megatron_a3po", path=[str(installed)])
    return distribution


def test_a_wheel_holds_every_file_of_the_package_and_the_recipes(installed: Path) -> None:
    def files(folder: Path) -> set[Path]:
        paths = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        return {path for path in paths if "__pycache__" not in path.parts}

    recipes = {Path("configs", path) for path in files(ROOT / "configs")}
    assert files(installed / "megatron_a3po") == files(ROOT / "megatron_a3po") | recipes
    assert metadata(installed).version == megatron_a3po.__version__


def test_recipes_are_found_by_name_in_a_foreign_folder(installed: Path, tmp_path: Path, model: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: configs/tiny_cpu.yaml\nnum_steps: 7\n")
    for name, steps in (("tiny_cpu", 60), ("configs/tiny_cpu.yaml", 60), ("mine.yaml", 7)):
        command = ["-m", "megatron_a3po", "train", "--config", name, f"model={model}", "--print-config"]
        printed = python(installed, tmp_path, *command, "rollout.max_new_tokens=7").splitlines()
        assert f"num_steps: {steps}" in printed and f"model: {model}" in printed


def test_the_console_script_is_the_module(installed: Path, tmp_path: Path, model: Path) -> None:
    (script,) = metadata(installed).entry_points.select(group="console_scripts")
    assert isinstance(script, EntryPoint) and script.name == "a3po"
    (tmp_path / "tiny_cpu.yaml").write_text(f"base: {ROOT / 'configs' / 'tiny_cpu.yaml'}\nseed: 12\n")
    command = ["train", "--config", "tiny_cpu.yaml", f"model={model}", "--print-config"]
    call = f"import sys; sys.argv = {['a3po', *command]}; from {script.module} import {script.attr}; {script.attr}()"
    printed = python(installed, tmp_path, "-c", call)
    assert printed == python(installed, tmp_path, "-m", "megatron_a3po", *command)
    assert "seed: 12\n" in printed  # a file that is there wins over a shipped recipe

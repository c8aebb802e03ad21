"""Packaging of megatron_a3po.

`requirements/` holds the versions of dependencies: two hashed locks, which `tools/setup_environment.sh` installs. Only
names are listed here, because package metadata cannot express the overrides of the tested set
(requirements/overrides.txt).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

_INIT = Path(__file__).parent / "megatron_a3po" / "__init__.py"
(_VERSION,) = re.findall(r'^__version__ = "(.+)"$', _INIT.read_text(encoding="utf-8"), re.MULTILINE)


class BuildWithConfigs(build_py):
    """Copy `configs/` into the package, where an installed one looks for recipes (config/yaml_files.py)."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_tree("configs", f"{self.build_lib}/megatron_a3po/configs")


setup(
    name="megatron_a3po",
    version=_VERSION,
    description="Asynchronous RL post-training of LLMs: Megatron-Core actors, the A-3PO loss, SGLang rollout servers",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_a3po", "megatron_a3po.*"]),
    package_data={"megatron_a3po": ["cpu/sgl_stand_in/**/*"]},
    cmdclass={"build_py": BuildWithConfigs},
    entry_points={"console_scripts": ["a3po = megatron_a3po.__main__:console"]},
    install_requires=[
        "torch",
        "megatron-core",
        "megatron-bridge",
        "transformers",
        "numpy",
        "safetensors",
        "psutil",
        "pydantic",
        "pyyaml",
        "aiohttp",
        "tensorboard",
        "matplotlib",
        "reasoning-gym",
        "math-verify",
        "datasets",
        "pyarrow",
        "tqdm",
    ],
    extras_require={
        "rollout": ["sglang", "torchvision"],
        "dev": [
            "pytest",
            "pytest-asyncio",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "types-PyYAML",
            "import-linter",
        ],
    },
)

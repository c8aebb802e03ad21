"""Packaging of megatron_a3po.

`requirements/` holds the versions: two hashed locks, which `tools/setup_environment.sh` installs. Here are names only,
because the tested set needs overrides (see requirements/overrides.txt) that a package's metadata cannot express.
"""

from setuptools import find_packages, setup

setup(
    name="megatron_a3po",
    version="0.1.0",
    description="Asynchronous RL post-training of LLMs: Megatron-Core actors, the A-3PO loss, SGLang rollout servers",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_a3po", "megatron_a3po.*"]),
    package_data={"megatron_a3po": ["**/*.yaml", "cpu/sgl_stand_in/**/*"]},
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

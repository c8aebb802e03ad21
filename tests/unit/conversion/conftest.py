"""What tests of conversions share: a process that converts, and models with what they become."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_a3po import cpu
from tests.support.tiny_models import save_tiny_model


@dataclass(frozen=True)
class Converter:
    """Both directions, on one process. Each method returns the folder that it makes."""

    processes: Any

    def to_megatron(self, model: Path, target: Path) -> Path:
        from megatron_a3po.conversion.to_megatron import convert_to_megatron

        convert_to_megatron(model, target, self.processes)
        return target

    def to_hf(self, weights: Path, target: Path, *, model: Path | None = None, fp8: bool = False) -> Path:
        from megatron_a3po.conversion.to_hf import convert_to_hf, find_source

        convert_to_hf(find_source(weights, model), target, self.processes, fp8=fp8)
        return target

    def compare(self, model: Path, megatron: Path) -> int:
        from megatron_a3po.conversion import verify

        return verify._compare_tensors(model, megatron / "weights", self.processes, fp8=False)


@pytest.fixture(scope="module")
def converter() -> Iterator[Converter]:
    cpu.install()
    from megatron.core import parallel_state

    from megatron_a3po.conversion.processes import Processes

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    parallel_state.initialize_model_parallel(1, 1, expert_tensor_parallel_size=1, create_gloo_process_groups=False)
    yield Converter(Processes(rank=0, world_size=1, group=dist.group.WORLD))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, converter: Converter) -> Callable[[str], tuple[Path, Path]]:
    """Return the folder of a family's model, and the one that it is converted to. Nobody changes them."""
    root = tmp_path_factory.mktemp("models")

    def of(family: str) -> tuple[Path, Path]:
        hf, megatron = root / family / "hf", root / family / "megatron"
        if not megatron.exists():
            save_tiny_model(family, hf)
            converter.to_megatron(hf, megatron)
        return hf, megatron

    return of


@pytest.fixture
def model(both: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> Path:
    """Return a Qwen3 that the test may damage."""
    return Path(shutil.copytree(both("qwen3")[0], tmp_path / "hf"))


@pytest.fixture
def megatron(both: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> Path:
    """Return what the Qwen3 is converted to, for a test that damages it."""
    return Path(shutil.copytree(both("qwen3")[1], tmp_path / "megatron"))


def model_config(folder: Path) -> dict[str, Any]:
    described: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return described


def change_config(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps(model_config(folder) | fields))

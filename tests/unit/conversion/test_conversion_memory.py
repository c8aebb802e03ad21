"""Logits are compared where there is memory for it, and otherwise a verification says why not."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_process import in_own_process
from tests.support.tiny_models import save_tiny_model


def said_with_a_full_gpu(folder: Path) -> tuple[int, str]:
    """(exit code, output) of the comparison where 4 bytes per parameter are free on the GPU"""
    import torch

    from megatron_a3po.conversion import logits
    from megatron_a3po.preflight.load import load_architecture

    free: Any = (4 * load_architecture(folder).num_parameters, 80 << 30)
    logits.choose_modules = lambda: "cuda"
    torch.cuda.mem_get_info = lambda device=None: free
    with redirect_stdout(io.StringIO()) as output:
        return logits.main(folder, folder), output.getvalue()


def said_with_a_full_host(folder: Path) -> str:
    import psutil

    from megatron_a3po import cpu

    cpu.install()
    from megatron_a3po.conversion import verify

    nothing_free = psutil.virtual_memory()._replace(available=1000)
    psutil.virtual_memory = lambda: nothing_free
    return verify._compare_logits(folder, folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny_model("qwen3", tmp_path)
    return tmp_path


def test_logits_are_not_compared_where_the_gpu_has_no_room_for_the_model(model: Path) -> None:
    code, output = in_own_process(said_with_a_full_gpu, model)

    assert code == 0
    assert output.startswith("logits not compared: a model in float32 needs 0.0 GiB of GPU memory, and 0.0 GiB are")


def test_logits_are_not_compared_where_the_host_has_no_room(model: Path) -> None:
    output = in_own_process(said_with_a_full_host, model)

    assert output.startswith("logits not compared: a model in float32 needs 0.0 GiB of memory, and 0.0 GiB are free")

"""Logits are compared where there is memory for it, and otherwise a verification says why not."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_a3po import cpu
from megatron_a3po.conversion import logits
from megatron_a3po.preflight.load import load_architecture
from tests.support.tiny_models import save_tiny_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    save_tiny_model("qwen3", tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a program of its own changes it
    yield tmp_path
    logging.disable(logging.NOTSET)


def test_logits_are_not_compared_where_the_gpu_has_no_room_for_the_model(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    four_bytes_each: Any = (4 * load_architecture(model).num_parameters, 80 << 30)
    monkeypatch.setattr(logits, "choose_modules", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: four_bytes_each)

    assert logits.main(model, model) == 0
    assert capsys.readouterr().out.startswith("logits not compared: a model in float32 needs 0.0 GiB of GPU memory")


def test_logits_are_not_compared_where_the_host_has_no_room(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.install()
    from megatron_a3po.conversion import verify

    nothing_free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: nothing_free)

    assert verify._compare_logits(model, model).startswith(
        "logits not compared: a model in float32 needs 0.0 GiB of mem"
    )

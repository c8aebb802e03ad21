"""What tests of publication through files share."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_a3po.weights.transports.delta.followers import follow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Make a model folder without weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 1}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The tensors' bytes, as the safetensors library reads them."""
    assert (folder / "config.json").is_file()
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


@contextmanager
def following(folder: Path, local: Path) -> Iterator[None]:
    """Follow the run in a thread, as node1."""
    ended = threading.Event()
    follower = threading.Thread(target=follow, args=(folder, local, "node1", lambda: not ended.is_set()), daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join(60.0)

"""What tests of publication through files share."""

from pathlib import Path

import pytest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Make a model folder without weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 1}')
    (folder / "tokenizer.json").write_text("{}")
    return folder

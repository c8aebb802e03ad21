"""One tiny model and one real SGLang server for the whole test session."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, get, wait_until
from tests.support.deadlines import scaled

SERVER_START_SECONDS = 240.0


@pytest.fixture(scope="session")
def model() -> Path:
    """The quickstart's model, as its own tool makes it."""
    folder = ROOT / "models" / "tiny_qwen3"
    subprocess.run(
        [sys.executable, "tools/make_tiny_model.py", "--output", folder], cwd=ROOT, check=True, timeout=scaled(240)
    )
    return folder


@pytest.fixture(scope="session")
def server_url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that belongs to nobody's run, as `rollout.servers: [url]` expects it."""
    from megatron_a3po.serving.local_server import LocalServer

    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    log_file = tmp_path_factory.mktemp("server") / "server.log"
    with LocalServer(model, log_file) as server:
        wait_until(lambda: get(f"{server.url}/ready")[0] == 200, SERVER_START_SECONDS, server.describe_death)
        yield server.url

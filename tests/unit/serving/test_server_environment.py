"""What a server's process does not inherit from the run's."""

import time
from pathlib import Path

import pytest

from megatron_a3po.serving.local_server import LocalServer
from tests.support.scripted_server import PROMPT_SECONDS


@pytest.mark.parametrize("gpus", [None, ["4", "5"]])
def test_what_makes_logprobs_others_or_is_for_ranks_is_not_passed_on(
    gpus: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SGLANG_RETURN_ORIGINAL_LOGPROB", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PASSED_ON"):
        monkeypatch.setenv(name, "1")
    log = tmp_path / "server.log"

    with LocalServer(tmp_path, log, gpus=gpus, make_command=lambda _: ["/usr/bin/env"]) as server:
        deadline = time.monotonic() + PROMPT_SECONDS
        while server.describe_death() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    names = {line.partition("=")[0] for line in log.read_text().splitlines()}
    assert "PASSED_ON" in names
    assert not names & {"SGLANG_RETURN_ORIGINAL_LOGPROB", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}

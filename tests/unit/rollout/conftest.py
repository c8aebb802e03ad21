"""What a run's rollout side needs beside it: a model's folder, a server and a process group."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_a3po.fleet.event_loop import EventLoopThread
from tests.support.deadlines import scaled
from tests.support.scripted_rollouts import describe_model
from tests.support.scripted_server import ScriptedServer


@pytest.fixture(scope="module")
def gloo_group() -> Iterator[dist.ProcessGroup]:
    """Return a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=scaled(10)))
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return describe_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    loop, server = EventLoopThread(), ScriptedServer(version="0")
    loop.run(server.__aenter__(), scaled(5.0))
    yield server
    loop.run(server.__aexit__(), scaled(5.0))
    loop.close()

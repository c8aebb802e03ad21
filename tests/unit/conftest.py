"""What unit tests of publication share: the trainer's process group, and receivers in processes of their own."""

from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.support.receiver import Receiver, start_receiver


@pytest.fixture(scope="module")
def default_group() -> Iterator[None]:
    """Make the process group that a trainer always has."""
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        # A TCPStore asks the resolver for the name of each client, for its log: 5 s where no resolver answers.
        patch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=10))
        yield
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def receivers() -> Iterator[list[Receiver]]:
    with start_receiver() as first, start_receiver() as second:
        yield [first, second]


@pytest.fixture
def first_receiver(receivers: list[Receiver]) -> Receiver:
    receivers[0].buffers.clear()
    return receivers[0]


@pytest.fixture
def second_receiver(receivers: list[Receiver]) -> Receiver:
    receivers[1].buffers.clear()
    return receivers[1]

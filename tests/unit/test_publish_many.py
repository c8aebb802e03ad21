"""Two hundred publications cost what the second one did."""

import os
from collections.abc import Iterator

import psutil
import pytest
import torch

from tests.unit.scripted_server import Receiver, start_receiver
from tests.unit.test_publisher import default_group, publishing, serve  # noqa: F401

NUM_TENSORS = 40
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with start_receiver() as receiver:
        yield receiver


def test_memory_open_files_and_threads_stay_as_they_are_over_200_publications(receiver: Receiver) -> None:
    weights = [(f"t{number}", torch.zeros(8192)) for number in range(NUM_TENSORS)]
    process = psutil.Process(os.getpid())
    resident, files, threads = [], [], []
    with serve(receiver) as (server,), publishing([server], lambda: weights, bucket_bytes=MEGABYTE // 4) as publisher:
        plan = publisher.plan
        for version in range(200):
            weights[-1][1].fill_(version)
            metrics = publisher.publish(version)
            assert server.version == str(version)
            assert receiver.buffers[-1][-4:] == torch.tensor(float(version)).numpy().tobytes()
            # What the scripted server remembers is not the publisher's.
            receiver.buffers.clear()
            server.calls.clear()
            resident.append(process.memory_info().rss)
            files.append(process.num_fds())
            threads.append(process.num_threads())
        assert publisher.plan is plan

    assert (metrics["published_bytes"], metrics["publish_buckets"]) == (NUM_TENSORS * 32768.0, 5.0)
    assert max(resident[100:]) - max(resident[50:100]) < 4 * MEGABYTE
    assert max(files[100:]) <= max(files[50:100]) + 2
    assert max(threads[100:]) <= max(threads[50:100]) + 2

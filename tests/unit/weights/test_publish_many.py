"""A hundred publications cost what the first ones did, and go through one group."""

import threading

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support.own_process import in_own_process
from tests.support.publishing import publishing, serve
from tests.support.receiver import start_receiver

NUM_TENSORS = 40
MEGABYTE = 1 << 20
NUM_PUBLICATIONS = 100


def test_memory_open_files_and_threads_stay_as_they_are_over_100_publications(monkeypatch: pytest.MonkeyPatch) -> None:
    # One arena for all threads: else which one allocates first decides how much is resident.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    resident, files, threads = in_own_process(publish_many)
    assert len(resident) == NUM_PUBLICATIONS
    # Less than 40 KB a publication; a buffer is more than six times as large.
    assert max(resident[50:]) - max(resident[25:50]) < 2 * MEGABYTE
    assert max(files[50:]) <= max(files[25:50]) + 2
    assert max(threads[50:]) <= max(threads[25:50]) + 2


def publish_many() -> tuple[list[int], list[int], list[int]]:
    """Resident bytes, open files and threads after each publication."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weights = [(f"t{number}", torch.zeros(8192)) for number in range(NUM_TENSORS)]
    process = psutil.Process()
    resident, files, threads, joins = [], [], [], 0
    with (
        start_receiver() as receiver,
        serve(receiver) as (server,),
        publishing([server], lambda: weights, bucket_bytes=MEGABYTE // 4) as publisher,
    ):
        plan = publisher.plan
        for version in range(NUM_PUBLICATIONS):
            weights[-1][1].fill_(version)
            metrics = publisher.publish(version)
            assert server.version == str(version)
            assert receiver.buffers[-1][-4:] == torch.tensor(float(version)).numpy().tobytes()
            receiver.buffers.clear()
            joins += server.paths().count("/init_weights_update_group")
            server.calls.clear()
            resident.append(process.memory_info().rss)
            files.append(process.num_fds())
            # What the scripted server remembers and waits with is not the publisher's.
            of_server = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
            threads.append(process.num_threads() - of_server)
        assert publisher.plan is plan and joins == 1
    assert (metrics["published_bytes"], metrics["publish_buckets"]) == (NUM_TENSORS * 32768.0, 5.0)
    dist.destroy_process_group()
    return resident, files, threads

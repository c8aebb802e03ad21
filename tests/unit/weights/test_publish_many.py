"""Sixty publications cost what the first ones did, and go through one group."""

import ctypes
import threading
from concurrent.futures import ProcessPoolExecutor

import psutil
import torch
import torch.distributed as dist

from tests.support.deadlines import scaled
from tests.support.publishing import JOIN, running
from tests.support.receiver import FORKED, start_receiver

NUM_TENSORS = 40
MEGABYTE = 1 << 20
NUM_PUBLICATIONS = 60
M_ARENA_MAX = -8


def test_memory_open_files_and_threads_stay_as_they_are_over_60_publications() -> None:
    with ProcessPoolExecutor(max_workers=1, mp_context=FORKED) as pool:
        resident, files, threads = pool.submit(publish_many).result(scaled(120.0))
    assert len(resident) == NUM_PUBLICATIONS
    # Less than 40 KB a publication; a buffer is more than six times as large.
    assert max(resident[30:]) - max(resident[15:30]) < 30 * 40_000
    assert max(files[30:]) <= max(files[15:30]) + 2
    assert max(threads[30:]) <= max(threads[15:30]) + 2


def publish_many() -> tuple[list[int], list[int], list[int]]:
    """Resident bytes, open files and threads after each publication."""
    # One arena for all threads: else which one allocates first decides how much is resident.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weights = [(f"t{number}", torch.zeros(8192)) for number in range(NUM_TENSORS)]
    process = psutil.Process()
    resident, files, threads, joins = [], [], [], 0
    with (
        start_receiver() as receiver,
        running(receiver, tensors=lambda: weights, bucket_bytes=MEGABYTE // 4) as run,
    ):
        (server,), plan = run.servers, run.publisher.plan
        for version in range(NUM_PUBLICATIONS):
            weights[-1][1].fill_(version)
            metrics = run.publish(version)
            assert server.version == str(version)
            assert receiver.buffers[-1][-4:] == torch.tensor(float(version)).numpy().tobytes()
            receiver.buffers.clear()
            joins += server.paths().count(JOIN)
            server.calls.clear()
            resident.append(process.memory_info().rss)
            files.append(process.num_fds())
            # What the scripted server remembers and waits with is not the publisher's.
            of_server = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
            threads.append(process.num_threads() - of_server)
        assert run.publisher.plan is plan and joins == 1
    assert (metrics["published_bytes"], metrics["publish_buckets"]) == (NUM_TENSORS * 32768.0, 5.0)
    dist.destroy_process_group()
    return resident, files, threads

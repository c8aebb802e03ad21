"""Servers that come while a run goes on: they take part from the next publication on, and are looked after then."""

import asyncio
import time

import pytest

from megatron_a3po.fleet.protocol import GenerateResponse
from tests.support.publishing import OneRank, fleet_of, make_publisher, serve, some_tensors
from tests.support.receiver import Receiver
from tests.support.scripted_server import refuse
from tests.unit.fleet.test_publication_faults import REQUEST, Run
from tests.unit.serving.test_local_server import wait_until

pytestmark = pytest.mark.usefixtures("default_group")

NOBODY = "http://127.0.0.1:1"


def sampled(run: Run) -> tuple[set[str], set[str]]:
    """URLs of the servers that answer requests, and the version labels of what they sample."""
    pool = run.fleet.pool
    for server in run.servers:
        server.calls.clear()
        server.generation_seconds = lambda _: 0.05

    async def sample() -> list[list[GenerateResponse]]:
        return await asyncio.gather(*(pool.generate(REQUEST) for _ in range(4)))

    responses = [response for answers in run.fleet.loop.run(sample(), 10.0) for response in answers]
    asked = {server.url for server in run.servers if server.bodies("/generate")}
    return asked, {span.version for response in responses for span in response.meta_info.weight_versions}


def test_a_new_server_receives_the_next_version_and_is_sampled_from(
    first_receiver: Receiver,
    second_receiver: Receiver,
) -> None:
    source = OneRank(some_tensors, 120)
    with (
        serve(first_receiver, second_receiver) as servers,
        fleet_of(servers[0].url) as fleet,
        make_publisher(source, fleet, 15.0) as publisher,
    ):
        first, second = (server.url for server in servers)
        run = Run(servers, fleet, publisher)
        watch = fleet.loop.submit(fleet.pool.watch())
        fleet.find_urls = lambda: [first]
        assert run.publish(0)["servers_healthy"] == 1
        fleet.find_urls = lambda: [first, f"{second}/", NOBODY]
        assert sampled(run) == ({first}, {"0"})

        metrics = run.publish(1)
        assert (metrics["servers_healthy"], metrics["servers_quarantined"]) == (2, 1)
        assert sampled(run) == ({first, second}, {"1"})
        assert run.quarantined == [NOBODY]
        number = len(second_receiver.buffers)
        assert number > 1 and second_receiver.buffers == first_receiver.buffers[number:]

        # From then on it is watched as the others are, and comes back as they do.
        servers[1].version = "default"
        wait_until(lambda: second in run.quarantined)
        assert sampled(run) == ({first}, {"1"})
        assert run.publish(2)["servers_healthy"] == 2
        assert sampled(run) == ({first, second}, {"2"})
        assert not watch.done()
        watch.cancel()


def test_a_new_server_that_cannot_take_part_stops_nobody(
    first_receiver: Receiver,
    second_receiver: Receiver,
) -> None:
    """Those that were there at the start are enough, whatever comes."""
    source = OneRank(some_tensors, 120)
    with (
        serve(first_receiver, second_receiver) as servers,
        fleet_of(servers[0].url) as fleet,
        make_publisher(source, fleet, 15.0) as publisher,
    ):
        first, second = (server.url for server in servers)
        run = Run(servers, fleet, publisher)
        run.publish(0)
        fleet.find_urls = lambda: [first, second]
        servers[1].script("/begin_weight_update", refuse(400, "a session is open"))
        for version in (1, 2):
            start = time.monotonic()
            run.publish(version)
            assert time.monotonic() - start < 45.0, "less than a silent server stays silent"
            assert sampled(run) == ({first}, {str(version)})
        assert run.quarantined == [second]

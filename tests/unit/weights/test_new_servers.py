"""Servers that come while a run goes on: they take part from the next publication on, and are looked after then."""

import pytest

from tests.support.publishing import running
from tests.support.receiver import Receiver
from tests.support.scripted_server import refuse
from tests.unit.serving.test_local_server import wait_until

pytestmark = pytest.mark.usefixtures("default_group")

NOBODY = "http://127.0.0.1:1"


def test_a_new_server_receives_the_next_version_and_samples(
    first_receiver: Receiver, second_receiver: Receiver
) -> None:
    with running(first_receiver, second_receiver, num_known=1) as run:
        first, second = (server.url for server in run.servers)
        watch = run.fleet.loop.submit(run.fleet.pool.watch())
        run.fleet.find_urls = lambda: [first]
        assert run.publish(0)["servers_healthy"] == 1
        run.fleet.find_urls = lambda: [first, f"{second}/", NOBODY]
        assert run.sampled() == ({first}, {0})

        metrics = run.publish(1)
        assert (metrics["servers_healthy"], metrics["servers_quarantined"]) == (2, 1)
        assert run.sampled() == ({first, second}, {1})
        assert run.quarantined == [NOBODY]
        number = len(second_receiver.buffers)
        assert number > 1 and second_receiver.buffers == first_receiver.buffers[number:]

        # From then on it is watched as the others are, and comes back as they do.
        run.servers[1].version = "default"
        wait_until(lambda: second in run.quarantined)
        assert run.sampled() == ({first}, {1})
        assert run.publish(2)["servers_healthy"] == 2
        assert run.sampled() == ({first, second}, {2})
        assert not watch.done()
        watch.cancel()


def test_a_new_server_that_cannot_take_part_stops_nobody(first_receiver: Receiver, second_receiver: Receiver) -> None:
    """Those that were there at the start are enough, whatever comes."""
    with running(first_receiver, second_receiver, num_known=1) as run:
        first, second = (server.url for server in run.servers)
        run.publish(0)
        run.fleet.find_urls = lambda: [first, second]
        run.servers[1].script("/begin_weight_update", refuse(400, "a session is open"))
        for version in (1, 2):
            run.publish(version)
            assert run.sampled() == ({first}, {version})
        assert run.quarantined == [second]

"""The state of a server, event by event, and what follows from it; the test moves the clock."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from megatron_a3po.errors import RolloutError, RolloutServerDied
from megatron_a3po.fleet.lease import Lease
from megatron_a3po.fleet.membership import TRANSITIONS, Event, Membership, Server, ServerState
from megatron_a3po.fleet.protocol import ServerInfo

CONNECTED, SERVING, UPDATING, RETURNING, QUARANTINED = ServerState
UPDATE_BEGUN, CONFIRMED, ANSWERED, FAILED, STILL_OUT, RETURNED = Event


class Client:
    def __init__(self, number: int) -> None:
        self.url = f"http://server{number}"


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def membership(num_servers: int = 1, min_servers: int | None = None, clock: Clock | None = None) -> Membership:
    clients: list[Any] = [Client(number) for number in range(num_servers)]
    return Membership([Server(client, Lease(client)) for client in clients], min_servers, clock or Clock())


HAPPEN: dict[Event, Callable[[Membership, Server, int], object]] = {
    UPDATE_BEGUN: lambda servers, _, __: servers.begin_update(),
    CONFIRMED: lambda servers, _, version: servers.confirm(version),
    ANSWERED: lambda servers, server, _: servers.accept(server),
    FAILED: lambda servers, server, _: servers.quarantine(server, RolloutError("it is slow")),
    STILL_OUT: lambda servers, server, _: servers.keep_out(server, RolloutError("it is not ready")),
    RETURNED: lambda servers, server, _: servers.take_back(server, ServerInfo()),
}
WAY_TO: dict[ServerState, list[Event]] = {
    CONNECTED: [],
    SERVING: [CONFIRMED],
    UPDATING: [CONFIRMED, UPDATE_BEGUN],
    RETURNING: [FAILED, RETURNED],
    QUARANTINED: [FAILED],
}
"""Events that bring a new server into the state"""

# from, event, to
ROWS = [
    (CONNECTED, UPDATE_BEGUN, CONNECTED),
    (CONNECTED, CONFIRMED, SERVING),
    (CONNECTED, FAILED, QUARANTINED),
    (SERVING, UPDATE_BEGUN, UPDATING),
    (SERVING, CONFIRMED, SERVING),
    (SERVING, ANSWERED, SERVING),
    (SERVING, FAILED, QUARANTINED),
    (UPDATING, UPDATE_BEGUN, UPDATING),
    (UPDATING, CONFIRMED, SERVING),
    (UPDATING, ANSWERED, UPDATING),
    (UPDATING, FAILED, QUARANTINED),
    (RETURNING, UPDATE_BEGUN, RETURNING),
    (RETURNING, CONFIRMED, SERVING),
    (RETURNING, FAILED, QUARANTINED),
    (QUARANTINED, STILL_OUT, QUARANTINED),
    (QUARANTINED, RETURNED, RETURNING),
]
# is a member, is sampled from, holds one whole version
FOLLOWS = {
    CONNECTED: (True, False, False),
    SERVING: (True, True, True),
    UPDATING: (True, True, False),
    RETURNING: (True, False, False),
    QUARANTINED: (False, False, False),
}


def in_state(state: ServerState) -> tuple[Membership, Server]:
    servers = membership(2, min_servers=0)
    server = servers.servers[0]
    for event in WAY_TO[state]:
        HAPPEN[event](servers, server, 7)
    assert server.state is state
    return servers, server


@pytest.mark.parametrize(("before", "event", "after"), ROWS, ids=lambda value: value.value)
def test_an_event_takes_a_server_from_state_to_state(before: ServerState, event: Event, after: ServerState) -> None:
    servers, server = in_state(before)
    HAPPEN[event](servers, server, 8)
    assert server.state is after
    assert (server.is_member, server.is_routable, server.is_whole) == FOLLOWS[after]
    has_version = after in (SERVING, UPDATING)
    assert server.version == ((8 if event is CONFIRMED else 7) if has_version else None)
    assert (server in servers.members, server in servers.quarantined) == (server.is_member, not server.is_member)
    assert (server.error is None) == server.is_member


def test_the_table_has_a_tested_row_for_every_transition() -> None:
    assert {(before, event): after for before, event, after in ROWS} == TRANSITIONS


METHODS: dict[Event, Any] = {
    UPDATE_BEGUN: lambda server: server.begin_update(),
    CONFIRMED: lambda server: server.confirm(8),
    ANSWERED: lambda server: server.accept(1.0),
    FAILED: lambda server: server.fail(RolloutError("again")),
    STILL_OUT: lambda server: server.stay_out(RolloutError("again")),
    RETURNED: lambda server: server.come_back(ServerInfo()),
}


@pytest.mark.parametrize(
    ("state", "event"),
    [pair for pair in itertools.product(ServerState, Event) if pair not in TRANSITIONS],
    ids=lambda value: value.value,
)
def test_an_event_that_a_state_does_not_know_is_an_error_and_changes_nothing(state: ServerState, event: Event) -> None:
    _, server = in_state(state)
    before = server.version, str(server.error), server.label
    with pytest.raises(ValueError, match=server.url):
        METHODS[event](server)
    assert server.state is state and (server.version, str(server.error), server.label) == before


def test_membership_is_another_one_whenever_others_take_part_and_the_first_reason_of_a_quarantine_stays() -> None:
    servers = membership(2, min_servers=1)
    server, seen = servers.servers[0], [servers.revision]
    servers.quarantine(server, RolloutError("first"))
    seen.append(servers.revision)
    servers.quarantine(server, RolloutError("second"))
    assert str(server.error) == "first" and servers.revision == seen[-1]
    servers.take_back(server, ServerInfo())
    seen.append(servers.revision)
    assert len(set(seen)) == 3


def turns(servers: Membership, server: Server, *, answers: bool, number: int = 20) -> list[int]:
    """Publications in which a server takes part that fails after each of them."""
    taken = []
    for publication in range(number):
        if not server.is_member and server.may_return():
            servers.take_back(server, ServerInfo())
        servers.begin_update()
        servers.confirm(publication)
        if server.is_member:
            taken.append(publication)
            if answers:
                servers.accept(server)
            servers.quarantine(server, RolloutError("it is silent"))
    return taken


@pytest.mark.parametrize("answers", [False, True])
def test_a_server_that_fails_after_each_return_is_asked_ever_more_rarely(answers: bool) -> None:
    """Also where it answers something short before, as the check of a publication does."""
    servers = membership(2, min_servers=1)
    assert turns(servers, servers.servers[0], answers=answers) == [0, 1, 3, 7, 15]


def test_a_server_that_has_done_well_from_one_publication_to_the_next_is_asked_at_once_again() -> None:
    servers = membership(2, min_servers=1)
    server = servers.servers[0]
    assert turns(servers, server, answers=False, number=8)[-1] == 7
    while not server.may_return():
        pass
    servers.take_back(server, ServerInfo())
    servers.confirm(8)
    servers.accept(server)
    servers.confirm(9)
    servers.quarantine(server, RolloutError("it is silent"))
    assert server.may_return()


def test_a_server_that_is_refused_and_does_not_answer_at_all_loses_no_turn() -> None:
    servers = membership(2, min_servers=1)
    server = servers.servers[0]
    servers.quarantine(server, RolloutError("it is slow"))
    servers.keep_out(server, RolloutServerDied("nobody there"))
    assert server.may_return() and str(server.error) == "it is slow"
    servers.keep_out(server, RolloutError("it is not ready"))
    assert not server.may_return() and str(server.error) == "it is not ready"


def test_a_new_server_has_not_failed_yet_and_takes_part_with_the_next_publication() -> None:
    servers = membership(1)
    client: Any = Client(1)
    servers.welcome(Server(client, Lease(client)))
    new = servers.servers[1]
    assert not new.is_member and new.may_return() and servers.counts()["servers_quarantined"] == 1
    servers.take_back(new, ServerInfo())
    servers.confirm(3)
    assert new.is_routable and servers.counts() == {
        "servers_healthy": 2.0,
        "servers_quarantined": 0.0,
        "server_resyncs": 1.0,
    }
    servers.quarantine(new, RolloutError("it is slow"))
    assert new.may_return(), "its first failure"


def test_silence_counts_from_the_last_response_or_answer_of_the_scheduler_and_anew_in_a_publication() -> None:
    """Also of a server whose responses had taken long before, and whose lease is not answered while it loads."""
    clock = Clock()
    servers = membership(clock=clock)
    server = servers.servers[0]
    servers.confirm(0)
    server.lease.last_answer, server.last_heard = 30.0, 90.0
    assert servers.silence(server) == 10.0
    servers.accept(server)
    clock.seconds = 104.0
    assert servers.silence(server) == 4.0
    server.lease.last_answer = 103.0
    assert servers.silence(server) == 1.0

    server.last_heard = 10.0
    servers.begin_publication()
    clock.seconds = 700.0
    servers.begin_publication()  # another attempt
    assert (servers.clock(), servers.silence(server)) == (104.0, 0.0), "the clock stands still"
    clock.seconds = 800.0
    servers.end_publication()
    clock.seconds = 803.0
    assert (servers.clock(), servers.silence(server)) == (107.0, 3.0)


def test_too_few_servers_are_an_error_with_all_reasons_but_not_while_the_publisher_decides() -> None:
    servers = membership(3, min_servers=2)
    first, second, _ = servers.servers
    servers.quarantine(first, RolloutError("the first is slow"))
    servers.raise_if_too_few()
    servers.begin_publication()
    servers.quarantine(second, RolloutServerDied("the second is gone"))
    servers.raise_if_too_few()
    servers.end_publication()
    with pytest.raises(RolloutServerDied, match=r"the second is gone.*1 of 3.*min_servers = 2.*the first is slow"):
        servers.raise_if_too_few()

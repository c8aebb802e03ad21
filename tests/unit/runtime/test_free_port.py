"""Ports for servers that take a while to start."""

import socket
from pathlib import Path

from megatron_a3po.runtime.processes import free_port


def test_the_port_is_free_and_never_given_to_a_connection_by_the_system() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(50)]

    assert all(1024 < port < 65536 and not first <= port <= last for port in ports)
    assert len(set(ports)) > 40, "two servers that start at the same time should not get the same port"


def test_a_port_that_somebody_listens_on_is_not_chosen() -> None:
    taken = [socket.create_server(("127.0.0.1", free_port())) for _ in range(5)]
    try:
        numbers = {server.getsockname()[1] for server in taken}
        assert not numbers & {free_port() for _ in range(200)}
    finally:
        for server in taken:
            server.close()

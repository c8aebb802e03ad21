"""The address at which servers find a rank: towards those on other machines, if there are any."""

import pytest

from megatron_a3po.weights.transports import rendezvous

HERE, ALSO_HERE, ELSEWHERE = "http://127.0.0.1:30000", "http://this-node:30001", "http://10.0.0.7:30000"


class Probe:
    """A socket that knows its own address towards each host."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self, address: tuple[str, int]) -> None:
        self.host = address[0]

    def getsockname(self) -> tuple[str, int]:
        """Debian's /etc/hosts gives a machine's own name a loopback address."""
        return {"127.0.0.1": "127.0.0.1", "this-node": "127.0.0.1"}.get(self.host, f"towards {self.host}"), 0


@pytest.mark.parametrize(
    ("urls", "local_world_size", "host"),
    [
        ([HERE, ALSO_HERE], 4, "127.0.0.1"),
        ([HERE, ELSEWHERE], 4, "towards 10.0.0.7"),
        ([ELSEWHERE, HERE], 2, "towards 10.0.0.7"),
        ([HERE, ALSO_HERE], 2, "towards 10.0.0.1"),
    ],
)
def test_the_address_is_one_that_all_servers_reach(
    urls: list[str], local_world_size: int, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world_size))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setattr(rendezvous.socket, "socket", Probe)
    monkeypatch.setattr(rendezvous, "free_port", lambda address: 7)

    assert rendezvous.meeting_place(urls) == (host, 7)

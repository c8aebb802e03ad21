"""How long the waits inside a publication last, besides `publish.timeout_seconds`."""

from dataclasses import dataclass

from megatron_a3po.runtime.waiting import REAL, Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitTimes:
    """All of them, with the clock that measures them."""

    clock: Clock = REAL
    message_look_seconds: float = 0.001
    """Time between two looks for a message of another rank. Each bucket waits for two messages; a look is one short
    request to rank 0's store."""
    failure_look_seconds: float = 0.01
    """Time between two looks for a failure elsewhere. The rank notices the end of its own work at once."""
    late_server_seconds: float = 5.0
    """How long the rendezvous store stays open after a server has refused. A slow server that finds no store would try
    until the group's own timeout, which is half an hour in SGLang."""
    abort_seconds: float = 5.0
    """How long the end of a broken group is waited for. NCCL ends its ranks at once, except one that still joins. Gloo
    ends when the servers leave; a group that has not ended by then is left behind."""
    group_margin_seconds: float = 10.0
    """How much longer the group's own timeout is than that of the publication, whose error says more"""
    follower_look_seconds: float = 0.1
    """Time between two looks at a file on shared storage, which may be slow"""
    retry_seconds: float = 1.0
    """Pause before a follower tries a version again after its first failure. Each further failure doubles it."""
    max_retry_seconds: float = 30.0
    """The longest such pause. It bounds how late a follower notices that its storage is back."""

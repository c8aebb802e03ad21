"""How long the waits inside a publication last, besides `publish.timeout_seconds`."""

from dataclasses import dataclass

from megatron_a3po.runtime.waiting import REAL, Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitTimes:
    """All of them, with the clock that measures them."""

    clock: Clock = REAL
    message_look_seconds: float = 0.001
    """Between two looks for a message of another rank: each bucket waits for two messages, and a look is one short
    request to rank 0's store"""
    failure_look_seconds: float = 0.01
    """Between two looks for a failure elsewhere, while a rank waits for its own work, whose end it notices at once"""
    late_server_seconds: float = 5.0
    """For a slow server to find the meeting place after another one has refused: where there is none any more, torch
    would keep the server's scheduler trying for the group's own timeout, which is half an hour in SGLang"""
    abort_seconds: float = 5.0
    """For the end of a broken group: NCCL ends its ranks at once, except one that still joins; gloo ends when the
    servers leave, and is then left behind"""
    group_margin_seconds: float = 10.0
    """By which the group's own timeout exceeds the publication's, whose error says more"""
    follower_look_seconds: float = 0.1
    """Between two looks at a file on shared storage, which may be slow"""
    retry_seconds: float = 1.0
    """Before a follower tries a version again after its first failure; twice as long after each further failure"""
    max_retry_seconds: float = 30.0
    """The longest such pause: a follower is back soon after its storage is"""

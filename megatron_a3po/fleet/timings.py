"""How long the run waits for rollout servers, in one place, so that tests can hand in other times."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseTimings:
    """Times of the lease of a server, in seconds."""

    lease_seconds: float = 10.0
    """A run that was killed has a server for so long."""
    retry_seconds: float = 1.0
    call_seconds: float = 5.0
    """For the answer to one call"""
    late_seconds: float = 120.0
    """A later answer of a busy scheduler is not waited for: the machine behind the connection may be gone."""


DEFAULT_LEASE_TIMINGS = LeaseTimings()


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetTimings:
    """Times in seconds, and numbers of attempts."""

    lease: LeaseTimings = DEFAULT_LEASE_TIMINGS
    watch_seconds: float = 1.0
    """Between two looks at the label of a server"""
    missed_answers: int = 5
    """A server that misses so many looks in a row is gone."""
    attempts: int = 3
    """Lost connections after which a server goes into quarantine"""
    retry_seconds: float = 1.0
    """Before the second attempt; twice as long before the third"""
    reset_seconds: float = 10.0
    """For each call that undoes what a dead run has left at a server"""
    start_look_seconds: float = 0.25
    """Between two attempts of a step of the start"""
    request_look_seconds: float = 1.0
    """Seconds between two looks, both of which must find a server silent: this process itself may have stood still."""
    patience: float = 4.0
    """A request is overdue after this many times the silence after which a server has failed."""
    grace_seconds: float = 5.0
    """For the answer of a server that only waited for the one that failed"""
    return_seconds: float = 10.0
    """For all that a server in quarantine has to answer before it takes part again"""
    keep_alive_seconds: float = 2.0
    """Below the 5 s of a server: a request on a connection that the server is closing would fail."""
    flush_attempts: int = 6
    flush_seconds: float = 0.1
    """Before the second attempt to flush; twice as long before each further one"""


DEFAULT_TIMINGS = FleetTimings()

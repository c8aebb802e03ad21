"""Errors that a user may see. Each message names the wrong value and the remedy."""


class A3poError(Exception):
    """Base class of errors that end a run with a message instead of a traceback."""


class ConfigError(A3poError):
    """The configuration cannot run as written. One message lists all mistakes."""


class RunFinished(A3poError):
    """The run has made all of its steps already, so there is nothing to do."""


class DataError(A3poError):
    """The task or dataset cannot give the prompts that the run needs."""


class RewardError(A3poError):
    """The reward function cannot be used, or fails for too many responses."""


class RolloutError(A3poError):
    """A rollout server gave no valid answer."""


class RolloutServerDied(RolloutError):
    """A rollout server's process ended, or nothing answers at its address any more."""


class PublishError(A3poError):
    """Weights did not reach a rollout server, or it does not compute with the weights that were sent."""


class CheckpointError(A3poError):
    """A checkpoint could not be written, or its files are not those that were written."""


class TrainingError(A3poError):
    """A training step found numbers that it must not learn from."""


class VersionError(A3poError):
    """A token's weight version is unknown, from the future, or older than `max_staleness` allows."""

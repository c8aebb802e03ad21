"""Every error that a user may see. The message names the value that was wrong and what to do about it."""


class A3poError(Exception):
    """Base of all errors that end a run with a message instead of a traceback."""


class ConfigError(A3poError):
    """The configuration cannot run as written: one message lists every mistake."""


class RunFinished(A3poError):
    """The run has made all of its steps: there is nothing to do, and nothing wrong."""


class DataError(A3poError):
    """The task or dataset cannot give the prompts that the run asks for."""


class RewardError(A3poError):
    """The reward function cannot be used, or fails for too many responses."""


class RolloutError(A3poError):
    """A rollout server gave no usable answer."""


class RolloutServerDied(RolloutError):
    """A rollout server's process ended, or nothing answers at its address any more."""


class PublishError(A3poError):
    """Weights did not reach a rollout server, or the server does not compute with the weights that were sent."""


class CheckpointError(A3poError):
    """A checkpoint could not be written, or is not what was written."""


class TrainingError(A3poError):
    """The training step met numbers that it must not learn from."""


class VersionError(A3poError):
    """A token's weight version is unknown, from the future, or older than `max_staleness` allows."""

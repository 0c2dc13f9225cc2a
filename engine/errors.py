"""Errors that a user can act on.

Every class takes one message, so that an error pickles and crosses a process border with its text intact. A message
names the setting, the values on both sides and the way out.
"""

import errno


class DrivetrainError(Exception):
    """Base of every error that Drivetrain raises on purpose."""


class ConfigError(DrivetrainError, ValueError):
    """A setting is unknown, has the wrong type or contradicts another setting."""


class CapabilityError(ConfigError):
    """The chosen backend does not have what the configuration asks for."""


class TopologyError(ConfigError):
    """A parallel layout does not fit the number of processes or the model."""


class ModelError(DrivetrainError, ValueError):
    """A model folder or a model family cannot be used."""


class DataError(DrivetrainError, ValueError):
    """A data file, a row or a column cannot be used."""


class BatchError(DrivetrainError, ValueError):
    """A batch breaks the packed format, or carries nothing to learn from."""


class BudgetError(BatchError):
    """A sequence, or a group that must stay together, is larger than the token budget."""


class NonFiniteError(DrivetrainError, ArithmeticError):
    """The loss or the gradient norm is NaN or infinite."""


class CheckpointError(DrivetrainError):
    """A checkpoint is missing, incomplete, damaged or of another model."""


def disk_error(what: str, error: OSError) -> CheckpointError:
    """A disk's error with what to do about it.

    Args:
        what: cannot be written.
        error: of the system.
    """
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return CheckpointError(
        f"{what} cannot be written ({error.strerror or error}){'; make room, or choose another folder' if full else ''}"
    )


class WorkerError(DrivetrainError):
    """A process of a worker group failed; the message holds its traceback."""


class WorkerLostError(WorkerError):
    """A process of a worker group died; the group must be rebuilt."""


class RemoteError(DrivetrainError):
    """Another rank failed; the message carries that rank's number and its error."""

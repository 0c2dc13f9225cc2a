"""Errors that a user can act on.

Every class takes a single message, so that an error keeps its text when it is pickled and sent to another process. A message
names the setting, both values and the way out.
"""

import errno
from collections.abc import Sequence
from typing import Self


class DrivetrainError(Exception):
    """Base class of all errors that Drivetrain raises deliberately."""


class ConfigError(DrivetrainError, ValueError):
    """A setting is unknown, has the wrong type or contradicts another setting."""


class CapabilityError(ConfigError):
    """The chosen backend does not support a value in the configuration."""


class NoAdapterError(ConfigError):
    """There is no adapter of a name; it must be loaded or created first."""


class TooManyAdaptersError(ConfigError):
    """The maximum number of adapters is reached; one must be dropped first."""


class TopologyError(ConfigError):
    """A parallel layout does not fit the number of processes or the model."""


class ModelError(DrivetrainError, ValueError):
    """A model folder or a model family cannot be used."""


class DataError(DrivetrainError, ValueError):
    """A data file, a row or a column cannot be used."""


class MediaError(DrivetrainError, ValueError):
    """An image, a video or audio cannot be read, decoded or processed."""


class BatchError(DrivetrainError, ValueError):
    """A batch violates the packed format, or has nothing to learn from."""


class BudgetError(BatchError):
    """A sequence, or a group that must stay together, is larger than the token budget."""


class NonFiniteError(DrivetrainError, ArithmeticError):
    """The loss or the gradient norm is NaN or infinite."""


class CheckpointError(DrivetrainError):
    """A checkpoint is missing, incomplete, damaged or of another model."""


class NoCheckpointError(CheckpointError):
    """A path is neither a checkpoint nor a run that has one."""


def disk_error(what: str, error: OSError) -> CheckpointError:
    """Return a CheckpointError for an error while writing, with the way out if the disk is full.

    Args:
        what: The file or folder that cannot be written.
        error: The error of the operating system.
    """
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return CheckpointError(
        f"{what} cannot be written ({error.strerror or error}){'; free up space, or choose another folder' if full else ''}"
    )


class WorkerError(DrivetrainError):
    """A process of a worker group failed; the message contains its traceback."""


class WorkerLostError(WorkerError):
    """A process of a worker group died; the group must be rebuilt."""


class NoWorkerError(WorkerLostError):
    """No worker accepts requests at the moment."""


class QueueFullError(WorkerError):
    """Too many requests are pending; send the request again later."""


class DataMissingError(DrivetrainError, LookupError):
    """Samples, or columns of samples, are not in the workers' data stores.

    Args:
        message: The message.
        ids: The samples.
    """

    def __init__(self, message: str, ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ids = list(ids)

    @classmethod
    def of(cls, ids: Sequence[str], keys: Sequence[str] = ()) -> Self:
        """Return the error for samples that lack some columns, or everything."""
        listed = ", ".join(repr(sample) for sample in ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
        if keys:
            return cls(f"the samples {listed} have no {', '.join(keys)}; compute or put it first", ids)
        return cls(f"the samples {listed} are not in the data store; they were dropped or never added", ids)


class HookError(DrivetrainError):
    """A hook that ran after a call failed. The call itself succeeded."""


class ManifestError(DrivetrainError):
    """The ranks did not receive the same requests in the same order."""


class RewardError(DrivetrainError):
    """A reward function failed, and the run is configured not to continue without its value."""


class RemoteError(DrivetrainError):
    """Another rank failed; the message contains that rank's number and error."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on the device or on the host."""
    # Classes of torch are recognized by name, because this module does not import it. Its CPU allocator raises a
    # plain RuntimeError.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def install_command(extras: str) -> str:
    """Return how to install optional dependencies, for a message. Drivetrain is on no package index, so it is installed from its clone.

    Args:
        extras: The names of the extras in `pyproject.toml`, separated by commas; empty for none.
    """
    return f"pip install -e '.{f'[{extras}]' if extras else ''}' in the clone of Drivetrain"

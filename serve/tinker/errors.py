"""Errors of the service that are answered with a status."""

from ...engine.errors import DrivetrainError, WorkerError


class BadRequestError(DrivetrainError):
    """A request that is refused.

    Args:
        message: Why, in the words of its sender.
        status: The HTTP status.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def reason(error: BaseException) -> str:
    """Return the message of an error for a user, also of one in a process."""
    # The message of a WorkerError contains the traceback of its process, which is not for the client.
    return str(error.__cause__ if isinstance(error, WorkerError) and error.__cause__ is not None else error)

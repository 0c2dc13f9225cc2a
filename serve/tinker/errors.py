"""Errors that the service turns into HTTP responses, and their messages for clients."""

from ...engine.errors import DrivetrainError, WorkerError


class BadRequestError(DrivetrainError):
    """A request that is refused.

    Args:
        message: The reason, in terms of the protocol.
        status: The HTTP status code.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def reason(error: BaseException) -> str:
    """Return the message of an error for a client. For an error in a worker process, this is the message of the original error."""
    # The message of a WorkerError contains the traceback of the process, which clients should not see.
    return str(error.__cause__ if isinstance(error, WorkerError) and error.__cause__ is not None else error)

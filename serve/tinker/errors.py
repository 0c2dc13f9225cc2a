"""Errors of the service that are answered with a status."""

from ...engine.errors import DrivetrainError


class BadRequestError(DrivetrainError):
    """A request that is refused.

    Args:
        message: Why, in the words of its sender.
        status: The HTTP status.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

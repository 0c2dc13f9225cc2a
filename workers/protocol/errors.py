"""Errors of workers, as the controller raises them: the reason first, the original class as the cause."""

import builtins
from importlib import import_module
from typing import NoReturn

from ...engine import errors
from ...engine.errors import QueueFullError, WorkerError
from .messages import Error

LAST_OUTPUT = "; last output:"
"""The separator between how a process ended and the last lines that it printed."""


class RemoteWorkerError(Exception):
    """An error of a class that only the worker knows; the message names it."""


def cause_of(error: Error) -> Exception:
    """Return an exception like the one that a worker raised.

    It has the same class if that is Drivetrain's, torch's or built in, otherwise the nearest such base class.
    """
    name = error.error_type.rpartition(":")[2]
    message = error.message.removeprefix(f"{name}: ")
    for class_name in [error.error_type, *error.bases]:
        error_class = _known_class(class_name)
        if error_class is None:
            continue
        try:
            return error_class(message)
        except TypeError:  # a class that needs more than a message, such as UnicodeDecodeError
            continue
    return RemoteWorkerError(error.message)


def _known_class(name: str) -> type[Exception] | None:
    module, _, attribute = name.partition(":")
    candidate: object = None
    # Only classes of known modules: importing others by the name in a message could run any code.
    if module == errors.__name__:
        candidate = getattr(errors, attribute, None)
    elif module == "builtins":
        candidate = getattr(builtins, attribute, None)
    elif module.partition(".")[0] == "torch" and attribute == "OutOfMemoryError":
        candidate = getattr(import_module("torch"), attribute)
    return (
        candidate if isinstance(candidate, type) and issubclass(candidate, Exception) and candidate is not Exception else None
    )


def describe(error: Error, where: str) -> str:
    """Return the message of an error: the reason, where it happened, and the worker's traceback if it is not a user's error."""
    name = error.error_type.rpartition(":")[2].rpartition(".")[2]
    reason = error.message if not name or error.message.startswith(f"{name}: ") else f"{name}: {error.message}"
    return f"{reason} [{where}]" + (f"\n{error.traceback}" if error.traceback else "")


def raise_error(error: Error, where: str) -> NoReturn:
    """Raise a worker's error.

    Args:
        error: The worker's reply.
        where: The operation and the worker.

    Raises:
        WorkerError: Always; a QueueFullError if too many requests were pending. Its cause has the original class.
    """
    raised = QueueFullError if error.kind == "queue_full" else WorkerError
    raise raised(describe(error, where)) from cause_of(error)

"""Whether whoever asked for the running call has cancelled it. Imports no torch.

A call that can end early, with what it has so far, asks now and then. Others go on to their end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_check: ContextVar[Callable[[], bool] | None] = ContextVar("check", default=None)


@contextmanager
def cancellable(check: Callable[[], bool]) -> Iterator[None]:
    """Let `cancelled` ask a function, in this thread and block.

    Args:
        check: Returns whether the call has been cancelled; any thread may change what it returns.
    """
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def cancelled() -> bool:
    """Return whether the running call has been cancelled; False outside of `cancellable`."""
    check = _check.get()
    return check is not None and check()

"""Whether the caller has cancelled the running call.

A call that can end early with partial results polls this flag. Other calls run to completion.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_check: ContextVar[Callable[[], bool] | None] = ContextVar("check", default=None)


@contextmanager
def cancellable(check: Callable[[], bool]) -> Iterator[None]:
    """Make `cancelled` poll a function, in this thread and inside the `with` block.

    Args:
        check: Returns whether the call has been cancelled. Any thread may change its result.
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

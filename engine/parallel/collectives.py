"""Collectives that exchange objects and errors between ranks.

Every exchange transmits each rank's error along with its value, so an error that one rank raises outside a collective is
raised on all ranks at their next exchange, whichever exchange that is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..errors import RemoteError

T = TypeVar("T")

_clock = count(1)
"""A counter that orders the starts of blocks and the exchanges of errors in this process."""


def all_gather_object(value: Any, group: ProcessGroup | None = None, *, error: Exception | None = None) -> list[Any]:
    """Gather every rank's value. Collective over the group.

    Args:
        value: A picklable object.
        group: The ranks that take part; the default process group if None.
        error: This rank's error, which is raised on all ranks instead of returning values.

    Returns:
        The values in the group's rank order.

    Raises:
        Exception: This rank's own error.
        RemoteError: Another rank's error, with that rank's number and message.
    """
    text = None if error is None else f"{type(error).__name__}: {error}"
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (text, value), group=group)
    # This rank's own error takes precedence over those of other ranks, because it has a traceback.
    if error is None:
        failures = zip(dist.get_process_group_ranks(group), gathered, strict=True)
        failed = next(((rank, text) for rank, (text, _) in failures if text is not None), None)
        if failed is None:
            return [value for _, value in gathered]
        error = RemoteError(f"rank {failed[0]} failed: {failed[1]}")
    _record(error, group)
    raise error


def broadcast_object(value: T, group: ProcessGroup | None = None, *, error: Exception | None = None) -> T:
    """Return the value of the group's first rank on all ranks. Collective over the group.

    Args:
        value: A picklable object; that of the other ranks is not sent.
        group: The ranks that take part; the default process group if None.
        error: This rank's error, which is raised on all ranks instead of returning a value.

    Raises:
        Exception: This rank's own error.
        RemoteError: Another rank's error.
    """
    # Two exchanges instead of one, because gathering pads all values to the size of the largest, which only one rank may have.
    all_gather_object(None, group, error=error)
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def call_on_first(run: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """Call a function on the group's first rank and return its result on all ranks. Collective over the group.

    Args:
        run: The function; its result must be picklable.
        group: The ranks that take part; the default process group if None.

    Raises:
        Exception: The function's error, on the first rank.
        RemoteError: The same, on all other ranks.
    """
    result: Any = None
    error: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            result = run()
        except Exception as e:  # raised on all ranks by the exchange
            error = e
    first: T = broadcast_object(result, group, error=error)
    return first


@contextmanager
def collective_errors(group: ProcessGroup | None = None) -> Iterator[None]:
    """Raise an error of one rank on all ranks when the block ends. Collective over the group.

    Blocks may be nested over the same process group. If a rank fails before it enters the inner block, its exchange pairs with
    the one at the end of the other ranks' inner block; the error is then raised on all ranks and the outer blocks exchange
    nothing more.

    A rank that fails while the others are in a collective of tensors inside the block waits for them until the group's timeout,
    and then raises its own error.

    Args:
        group: The ranks that take part; the default process group if None.

    Raises:
        Exception: This rank's own error.
        RemoteError: Another rank's error.
    """
    start = next(_clock)
    try:
        yield
    except Exception as error:
        # An error that was exchanged before this block began counts as new, because the same object may be raised twice.
        if getattr(error, "raised_at", 0) > start and _ranks(group) <= ranks_notified_of(error):
            raise
        try:
            all_gather_object(None, group, error=error)
        # The exchange raises this rank's error itself. Another failure of it, such as a lost connection, must not
        # hide that error.
        except Exception as failure:
            if failure is not error:
                raise error from failure
        raise
    all_gather_object(None, group)


def _record(error: Exception, group: ProcessGroup | None) -> None:
    error.raised_on_ranks = ranks_notified_of(error) | _ranks(group)  # type: ignore[attr-defined]
    error.raised_at = next(_clock)  # type: ignore[attr-defined]


def ranks_notified_of(error: BaseException) -> frozenset[int]:
    """Return the global ranks on which an exchange has raised an error. None of them is waiting for the rank that failed."""
    ranks: frozenset[int] = getattr(error, "raised_on_ranks", frozenset())
    return ranks


def _ranks(group: ProcessGroup | None) -> frozenset[int]:
    return frozenset(dist.get_process_group_ranks(group))

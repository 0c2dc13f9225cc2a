"""Places that users share: as many are taken at a time as there are, and one that is free goes to each user who waits in turn."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class FairPlaces:
    """Places.

    Args:
        places: Their number.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Those who wait, by user, the one whose turn it is first."""

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Hold a place during the block, as soon as it is this user's turn."""
        await self._take(owner)
        try:
            yield
        finally:
            self._release()

    async def _take(self, owner: str) -> None:
        if self._free > 0:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # It was given a place at the same time.
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            queue = self._waiting.pop(owner)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def in_turn(waiting: Iterable[T], owners: Iterable[str], last: str) -> list[T]:
    """Return what waits in an order in which each user has one after the other, beginning after the user who was served last.

    Args:
        waiting: What waits, in the order of its arrival.
        owners: Whose each is.
        last: The user who was served last.
    """
    queues: dict[str, deque[T]] = {}
    for one, owner in zip(waiting, owners, strict=True):
        queues.setdefault(owner, deque()).append(one)
    names = list(queues)
    begin = names.index(last) + 1 if last in names else 0
    order: list[T] = []
    names = names[begin:] + names[:begin]
    while names:
        order += [queues[name].popleft() for name in names]
        names = [name for name in names if queues[name]]
    return order

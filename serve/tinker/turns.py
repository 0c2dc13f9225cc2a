"""Places that users share: as many are taken at a time as there are, and one that is free goes to each user who waits in turn."""

import asyncio
from collections import Counter, deque
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
            # A user with more requests returns to the end of the dict, behind all others who wait.
            queue = self._waiting.pop(owner)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue
            if not turn.done():
                # The place is passed on without becoming free, so that a new request cannot take it first.
                turn.set_result(None)
                return
        self._free += 1


class AdapterPlaces:
    """Places for work with adapters, of which a limited number is held at a time.

    A place that is free goes to each user who waits in turn. While somebody waits for an adapter that there is no room for, each that is held
    gets so many places since it is there, and then no more until it is unused and makes room: no user keeps an adapter by asking for more.

    Args:
        places: Their number, and how many each adapter gets at least.
        adapters: The number of adapters that are held at a time.
    """

    def __init__(self, places: int, adapters: int) -> None:
        self._free = self._places = places
        self._adapters = adapters
        self._held: dict[str, int] = {}
        """The number of places in use with each adapter that is held, the one that was used least recently first."""
        self._served: Counter[str] = Counter()
        """How many places each of them has got since it is held."""
        self._waiting: dict[str, dict[str, deque[asyncio.Future[None]]]] = {}
        """Those who wait, by user and adapter, the one whose turn it is first."""

    def holds(self, adapter: str) -> bool:
        """Return whether an adapter is one of those that are held."""
        return adapter in self._held

    @asynccontextmanager
    async def place(self, owner: str, adapter: str = "") -> AsyncIterator[None]:
        """Hold a place during the block, and the adapter, as soon as it is this user's turn; an empty name is none."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, {}).setdefault(adapter, deque()).append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # It was given a place at the same time.
                self._release(adapter)
            raise
        try:
            yield
        finally:
            self._release(adapter)

    def _release(self, adapter: str) -> None:
        self._free += 1
        if adapter:
            self._held[adapter] -= 1
        self._admit()

    def _admit(self) -> None:
        while self._free > 0 and (one := self._next()) is not None:
            adapter, turn = one
            self._free -= 1
            if adapter:
                self._use(adapter)
            turn.set_result(None)

    def _use(self, adapter: str) -> None:
        if adapter not in self._held and len(self._held) >= self._adapters:
            # There is one: `_next` admits an adapter only if there is room or one is unused.
            unused = next(name for name, users in self._held.items() if not users)
            del self._held[unused], self._served[unused]
        # Removed and inserted again, so that the dict stays in the order of last use.
        self._held[adapter] = self._held.pop(adapter, 0) + 1
        self._served[adapter] += 1

    def _next(self) -> tuple[str, "asyncio.Future[None]"] | None:
        """Take the one whose turn it is from those who wait, with its adapter; None if none can proceed."""
        self._forget_cancelled()
        is_full = len(self._held) >= self._adapters
        has_room = not is_full or not all(self._held.values())
        # Somebody waits for an adapter that is not held, and there is no room: adapters that are held get no more than
        # their share.
        is_missed = is_full and any(name and name not in self._held for queues in self._waiting.values() for name in queues)
        for owner, queues in self._waiting.items():
            for adapter, queue in queues.items():
                # The empty name is never held and takes no room, so it needs a free place only.
                if adapter in self._held:
                    can_go_on = not is_missed or self._served[adapter] < self._places
                else:
                    can_go_on = not adapter or has_room
                if not can_go_on:
                    continue
                turn = queue.popleft()
                # The others of this user, and the other users, come first now.
                del queues[adapter], self._waiting[owner]
                if queue:
                    queues[adapter] = queue
                if queues:
                    self._waiting[owner] = queues
                return adapter, turn
        return None

    def _forget_cancelled(self) -> None:
        for owner, queues in list(self._waiting.items()):
            for adapter, queue in list(queues.items()):
                # Waiting futures are only ever done by cancellation: those that got a place have left the queue.
                while queue and queue[0].done():
                    queue.popleft()
                if not queue:
                    del queues[adapter]
            if not queues:
                del self._waiting[owner]


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

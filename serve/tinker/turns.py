"""Semaphores and queues that serve users round-robin, so that a user with many requests does not delay the others."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class FairSemaphore:
    """A semaphore that serves users round-robin.

    Args:
        slots: The maximum number of holders at a time.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The waiting futures by user, in the order in which the users are served."""

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncIterator[None]:
        """Wait for a slot, and hold it during the block.

        Args:
            owner: The user that the slot is for.
        """
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
                # The slot was granted before the cancellation arrived.
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            # A user with more requests moves to the end of the dict, behind all other waiting users.
            queue = self._waiting.pop(owner)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue
            if not turn.done():
                # The slot is handed over without being counted as free, so that a new request cannot take it first.
                turn.set_result(None)
                return
        self._free += 1


class AdapterSemaphore:
    """A semaphore for work with adapters, of which only a limited number is loaded at a time. It serves users round-robin.

    While a request waits for an adapter for which there is no room, each loaded adapter is granted at most `slots` slots, counted from when it
    was loaded. After that it gets none until it is unused and can be replaced, so that a steady stream of requests cannot keep an adapter
    loaded forever.

    Args:
        slots: The maximum number of holders at a time.
        adapters: The maximum number of adapters that are loaded at a time.
    """

    def __init__(self, slots: int, adapters: int) -> None:
        self._free = self._slots = slots
        self._adapters = adapters
        self._held: dict[str, int] = {}
        """The number of slots in use for each loaded adapter, the least recently used adapter first."""
        self._served: Counter[str] = Counter()
        """The number of slots granted to each loaded adapter since it was loaded."""
        self._waiting: dict[str, dict[str, deque[asyncio.Future[None]]]] = {}
        """The waiting futures by user and adapter, in the order in which they are served."""

    def holds(self, adapter: str) -> bool:
        """Return whether an adapter is loaded."""
        return adapter in self._held

    @asynccontextmanager
    async def slot(self, owner: str, adapter: str = "") -> AsyncIterator[None]:
        """Wait for a slot and for the adapter, and hold both during the block.

        Args:
            owner: The user that the slot is for.
            adapter: The name of the adapter; empty for work without an adapter.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, {}).setdefault(adapter, deque()).append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # The slot was granted before the cancellation arrived.
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
            # An unused adapter exists, because `_next` returns an adapter only if there is room or one is unused.
            unused = next(name for name, users in self._held.items() if not users)
            del self._held[unused], self._served[unused]
        # Removed and inserted again, so that the dict stays ordered by last use.
        self._held[adapter] = self._held.pop(adapter, 0) + 1
        self._served[adapter] += 1

    def _next(self) -> tuple[str, "asyncio.Future[None]"] | None:
        """Remove the next waiting future that can be served, and return it with its adapter; None if there is none."""
        self._forget_cancelled()
        is_full = len(self._held) >= self._adapters
        has_room = not is_full or not all(self._held.values())
        # If a request waits for an adapter that is not loaded and there is no room, loaded adapters are limited to `slots`
        # grants.
        is_missed = is_full and any(name and name not in self._held for queues in self._waiting.values() for name in queues)
        for owner, queues in self._waiting.items():
            for adapter, queue in queues.items():
                # Work without an adapter (an empty name) needs only a free slot.
                if adapter in self._held:
                    is_admissible = not is_missed or self._served[adapter] < self._slots
                else:
                    is_admissible = not adapter or has_room
                if not is_admissible:
                    continue
                turn = queue.popleft()
                # This user, and this adapter among those of the user, move to the end of the order.
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
                # A future in a queue can only be done because it was cancelled: granted ones have left the queue.
                while queue and queue[0].done():
                    queue.popleft()
                if not queue:
                    del queues[adapter]
            if not queues:
                del self._waiting[owner]


def round_robin(waiting: Iterable[T], owners: Iterable[str], last: str) -> list[T]:
    """Return waiting items in round-robin order: one of each user in each round, beginning after the user who was served last.

    Args:
        waiting: The items in the order of their arrival.
        owners: The user of each item.
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

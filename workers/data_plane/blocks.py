"""Pieces of host memory that are used again when what they held has been read, also by another process of this machine."""

import mmap
import os
import time
import weakref
from collections import OrderedDict
from itertools import count
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...engine.errors import WorkerLostError

IN_FLIGHT = 3
"""Number of blocks that may be on their way, and that are kept for the next transfer."""
KEPT_BYTES = 16 * 2**20
"""Size up to which a block is kept for the next transfer."""
CAN_SHARE = hasattr(os, "memfd_create")

_HEAD = 4096
"""Where the bytes of a shared block begin: behind the number of its readings that have ended, on a page of their own."""
_POLL_S = 0.0002
_serials = count(1)


class InFlight(Protocol):
    """Bytes that are on their way from a piece of memory."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most this long; return whether the memory may change."""
        ...


class Block:
    """A piece of memory of this process.

    Args:
        size: Its size in bytes.
        pinned: Whether a GPU can copy to it without a detour.
    """

    shared = False

    def __init__(self, size: int, *, pinned: bool = False) -> None:
        self.data = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        """The memory `[size]` uint8."""
        self.pinned = pinned
        self.in_flight: list[InFlight] = []

    def is_free(self, wait_s: float = 0.0) -> bool:
        """Wait for at most this long; return whether the memory may change."""
        return all(some.wait(wait_s) for some in self.in_flight)


class SharedBlock(Block):
    """A piece of memory that other processes of this user on this machine can open.

    Args:
        size: Its size in bytes.
    """

    shared = True

    def __init__(self, size: int) -> None:
        file = os.memfd_create("drivetrain")
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, _HEAD + size)
        memory = mmap.mmap(file, _HEAD + size)
        self.data = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEAD, count=size)
        self.pinned = False
        self.in_flight = []
        self.address = (f"/proc/{os.getpid()}/fd/{file}", next(_serials), size)
        """What another process opens: the file, a number that no other block of this process has, and the size."""
        self._ended, self._lent = np.frombuffer(memory, np.uint64, 1), 0

    def lend(self) -> InFlight:
        """Note that another process will read the block once; return what tells when it has done so."""
        self._lent += 1
        return _Reading(self._ended, self._lent)


class _Reading:
    def __init__(self, ended: "np.ndarray[tuple[int], np.dtype[np.uint64]]", number: int) -> None:
        self._ended, self._number = ended, number

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while int(self._ended[0]) < self._number:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True


class BlockPool:
    """The blocks of a process, for one transfer after the other."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    def take(self, size: int, *, pinned: bool, shared: bool, patience_s: float) -> tuple[Block, bool]:
        """Return a block whose memory may change, and whether one was waited for in vain.

        Args:
            size: The number of bytes that it must have.
            pinned: Whether it is pinned. One that is shared is not.
            shared: Whether other processes can open it.
            patience_s: For how long to wait for a block if as many as may be are on their way. Then there is one more.
        """
        impatient = False
        while self._blocks:
            wait_s = patience_s if len(self._blocks) >= IN_FLIGHT else 0.0
            oldest = self._blocks[0]
            if not oldest.is_free(wait_s):
                impatient = wait_s > 0
                break
            del self._blocks[0]
            if oldest.data.numel() >= size and (oldest.shared, oldest.pinned) == (shared, pinned and not shared):
                return oldest, False
        return SharedBlock(size) if shared else Block(size, pinned=pinned), impatient

    def give(self, block: Block) -> None:
        """Take a block back, which may still be on its way."""
        self._blocks.append(block)

    def trim(self) -> None:
        """Keep few small blocks for the next transfer, and those that are still on their way."""
        free = [block for block in self._blocks if block.data.numel() <= KEPT_BYTES and block.is_free()][:IN_FLIGHT]
        self._blocks = [block for block in self._blocks if block in free or not block.is_free()]


class BlockReader:
    """Opens the blocks of other processes. Those of the last few addresses stay open."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[str, int], mmap.mmap] = OrderedDict()

    def read(self, path: str, serial: int, size: int, used: int) -> Tensor:
        """Return the bytes of a block as a tensor `[used]` uint8. The reading has ended when no tensor shares its memory any more.

        Args:
            path: The file, as in `SharedBlock.address`.
            serial: The number of the block.
            size: The size of the block.
            used: The number of bytes to return.

        Raises:
            WorkerLostError: The block cannot be opened.
        """
        memory = self._open.pop((path, serial), None)
        if memory is None:
            try:
                with open(path, "r+b") as file:
                    memory = mmap.mmap(file.fileno(), _HEAD + size)
            except (OSError, ValueError) as e:
                raise WorkerLostError(
                    f"the memory of a process of another pool cannot be opened ({path}: {e}); it has ended, or runs as another user or "
                    "in another container; use group.kind=ray for pools that do not share a machine"
                ) from e
        if size <= KEPT_BYTES:
            self._open[path, serial] = memory
        while len(self._open) > IN_FLIGHT + 1:
            self._open.popitem(last=False)
        array = np.frombuffer(memory, np.uint8, used, _HEAD)
        weakref.finalize(array, _end_reading, np.frombuffer(memory, np.uint64, 1)).atexit = False
        return torch.from_numpy(array)


def _end_reading(ended: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> None:
    ended += np.uint64(1)

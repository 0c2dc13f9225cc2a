"""Blocks of host memory that are reused once their contents have been read, also by other processes on this machine."""

import mmap
import os
import secrets
import time
import weakref
from collections import OrderedDict
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...engine.errors import WorkerLostError
from .staging import PinnedStaging

IN_FLIGHT = 3
"""Number of blocks that may be in flight, and that are kept for the next transfer."""
KEPT_BYTES = 16 * 2**20
"""Size up to which a block is kept for the next transfer."""
CAN_SHARE = hasattr(os, "memfd_create")

_COUNT, _NAME, _HEAD = 8, 32, 4096
"""A shared block begins with the number of its readings that have ended, and its name; its bytes begin on a page of their own."""
# The counter of readings in shared memory cannot wake another process, so it is polled.
_POLL_S = 0.0002


class InFlight(Protocol):
    """Bytes in flight from a piece of memory."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most this long; return whether the memory may change."""
        ...


class Block:
    """A piece of memory of this process.

    Args:
        size: Its size in bytes.
        pinned: Whether a GPU can copy to it directly.
    """

    shared = False

    def __init__(self, size: int, *, pinned: bool = False) -> None:
        self.data = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        """The memory `[size]` uint8."""
        self.pinned = pinned
        self.in_flight: list[InFlight] = []
        self.is_new = True
        """Whether it has not been used yet."""
        self.is_late = False
        """Whether a wait has timed out since it was last free, so that it is not waited for again."""

    def is_free(self, wait_s: float = 0.0) -> bool:
        """Wait for at most this long; return whether the memory may change."""
        if all(transfer.wait(0.0 if self.is_late else wait_s) for transfer in self.in_flight):
            self.in_flight, self.is_late = [], False
            return True
        self.is_late = self.is_late or wait_s > 0
        return False


class SharedBlock(Block):
    """A piece of memory that other processes of this user on this machine can open.

    Args:
        size: Its size in bytes.
    """

    shared = True

    def __init__(self, size: int) -> None:
        # A memfd has no name in a file system: its memory is freed with the last process that uses it, also after a
        # crash. The descriptor stays open as long as this object, because other processes open the block through it.
        file = os.memfd_create("drivetrain")
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, _HEAD + size)
        memory = mmap.mmap(file, _HEAD + size)
        name = secrets.token_hex(_NAME // 2)
        memory[_COUNT : _COUNT + _NAME] = name.encode()
        self.data = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEAD, count=size)
        self.pinned, self.in_flight, self.is_new, self.is_late = False, [], True, False
        self.address = (f"/proc/{os.getpid()}/fd/{file}", name, size)
        """The arguments for opening it in another process: the file, the name stored in it, and the size."""
        # Readings are counted, not identified: a block is reused only when all of them have ended, so their order does
        # not matter.
        self._ended, self._lent = np.frombuffer(memory, np.uint64, 1), 0

    def lend(self) -> InFlight:
        """Record that another process will read the block once; return a handle to wait for that."""
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
    """The blocks of a process, reused by successive transfers."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._staging: dict[torch.device, PinnedStaging] = {}

    def staging(self, device: torch.device) -> PinnedStaging:
        """Return the staging buffers for copies from a GPU to unpinned blocks."""
        if device not in self._staging:
            self._staging[device] = PinnedStaging(device)
        return self._staging[device]

    def take(self, size: int, *, pinned: bool, shared: bool, patience_s: float) -> Block:
        """Return a block whose memory may change.

        Args:
            size: The number of bytes that it must have.
            pinned: Whether it is pinned; shared blocks are never pinned.
            shared: Whether other processes can open it.
            patience_s: How long to wait for the oldest block if the maximum number is in flight, in seconds; then a new one is added.
        """
        pinned = pinned and not shared
        # Late blocks are not waited for again. Their reader may have ended, and every later block would cost the same
        # wait.
        awaited = [block for block in self._blocks if not block.is_late and not block.is_free()]
        if patience_s > 0 and len(awaited) >= IN_FLIGHT:
            awaited[0].is_free(patience_s)
        for block in self._blocks:
            if block.data.numel() >= size and (block.shared, block.pinned) == (shared, pinned) and block.is_free():
                self._blocks.remove(block)
                return block
        # Blocks that do not fit are freed before a larger one is allocated.
        self.trim()
        return SharedBlock(size) if shared else Block(size, pinned=pinned)

    def give(self, block: Block) -> None:
        """Return a block to the pool; it may still be in flight."""
        block.is_new = False
        self._blocks.append(block)

    def trim(self, wait_s: float = 0.0) -> None:
        """Keep only a few small blocks for the next transfer, and those still in flight.

        Args:
            wait_s: How long to wait for each block in flight first, in seconds.
        """
        free = [block for block in self._blocks if block.is_free(wait_s)]
        kept = [block for block in free if block.data.numel() <= KEPT_BYTES][:IN_FLIGHT]
        self._blocks = [block for block in self._blocks if block in kept or block not in free]


class BlockReader:
    """Opens the blocks of other processes. The last few small ones stay open."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, mmap.mmap] = OrderedDict()

    def read(self, path: str, name: str, size: int, used: int) -> Tensor:
        """Return the bytes of a block as a tensor `[used]` uint8. The reading has ended when no tensor shares its memory any more.

        Args:
            path: The file, as in `SharedBlock.address`.
            name: The name of the block.
            size: The size of the block.
            used: The number of bytes to return.

        Raises:
            WorkerLostError: The block cannot be opened.
        """
        # Removed and inserted again, so that the block that was used least recently is dropped first. A large block is
        # not kept: its memory would stay allocated after its owner has freed it.
        memory = self._open.pop(name, None) or _opened(path, name, size)
        if size <= KEPT_BYTES:
            self._open[name] = memory
        while len(self._open) > IN_FLIGHT + 1:
            # Not `close()`, which raises an error while arrays use the mapping; it ends with the last of them.
            self._open.popitem(last=False)
        array = np.frombuffer(memory, np.uint8, used, _HEAD)
        # The tensor below and all its views keep the array alive, so its end is the end of the reading.
        weakref.finalize(array, _end_reading, np.frombuffer(memory, np.uint64, 1)).atexit = False
        return torch.from_numpy(array)


def _opened(path: str, name: str, size: int) -> mmap.mmap:
    reason = "it is another file now"
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), _HEAD + size)
        # After a process has ended, its id may be reused by another one.
        if memory[_COUNT : _COUNT + _NAME] == name.encode():
            return memory
    except (OSError, ValueError) as e:
        reason = str(e)
    raise WorkerLostError(
        f"the memory of a process of another pool cannot be opened ({path}: {reason}); it has ended, or runs as another user or in another "
        "container; use group.kind=ray for pools that do not share a machine"
    )


def _end_reading(ended: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> None:
    # This is not atomic between processes. It need not be: a source of weights sends to a single process of another
    # pool.
    ended += np.uint64(1)

"""Tensors from a source to the files of a plan, in blocks of bounded size, by several threads. Imports no torch.

What is in memory at a time is a block or two for each thread, whatever the model's size.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..engine.checkpoint.hf_folder import Entry, FolderPlan, FolderWriter
from ..engine.checkpoint.safetensors_io import BLOCK_BYTES, ITEMSIZE, RAW, tensor_bytes
from ..engine.checkpoint.tensor_slices import TensorSlice
from ..engine.checkpoint.thread_pool import in_parallel

Progress = Callable[[int], None]
"""Called with the number of bytes written since the last call, by any thread."""


class Blocks(Protocol):
    """Where blocks come from."""

    def block(self, name: str, part: TensorSlice, room: "BlockBuffer") -> Any:
        """A part of a tensor as it is written: a contiguous array of raw numbers, which the next call may overwrite."""
        ...


class BlockBuffer:
    """A thread's own memory, used again for every block: pages once touched are fast."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def take(self, use: str, dtype: str, shape: tuple[int, ...]) -> Any:
        """An array of raw numbers."""
        size = tensor_bytes(dtype, shape)
        if use not in self._kept or self._kept[use].nbytes < size:
            self._kept[use] = np.empty(size, np.uint8)
        return self._kept[use][:size].view(RAW[ITEMSIZE[dtype]]).reshape(shape)


def blocks_of(entry: Entry, limit: int = BLOCK_BYTES) -> Iterator[tuple[TensorSlice, int]]:
    """A tensor's rows in blocks, each with the byte at which it begins; none for an empty tensor."""
    dtype, shape = entry
    if 0 in shape:
        return
    if not shape:
        yield TensorSlice((), ()), 0
        return
    rest = (0,) * (len(shape) - 1)
    row = tensor_bytes(dtype, shape[1:])
    step = max(1, limit // max(1, row))
    for first in range(0, shape[0], step):
        yield TensorSlice((first, *rest), (min(step, shape[0] - first), *shape[1:])), first * row


def copy_tensors(
    plan: FolderPlan, writer: FolderWriter, source: Blocks, workers: int, progress: Progress | None = None
) -> None:
    """Write every tensor of a plan.

    Args:
        plan: of the files.
        writer: of them.
        source: of the blocks.
        workers: threads.
        progress: is told of every block.

    Raises:
        CheckpointError: of the source; OSError of the disk. The first one ends all threads.
    """
    own = threading.local()

    def one(name: str, part: TensorSlice, start: int) -> None:
        if not hasattr(own, "room"):
            own.room = BlockBuffer()
        found = source.block(name, part, own.room)
        writer.write(name, start, memoryview(found.reshape(-1)).cast("B"))
        if progress is not None:
            progress(found.nbytes)

    in_parallel(
        workers,
        (
            partial(one, name, part, start)
            for tensors in plan.files.values()
            for name, entry in tensors.items()
            for part, start in blocks_of(entry)
        ),
    )

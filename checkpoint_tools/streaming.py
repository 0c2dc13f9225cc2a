"""Copying of tensors from a source into the files of a plan, in blocks of bounded size, with several threads.

Each thread keeps one or two blocks in memory at a time, regardless of the size of the model.
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

ProgressCallback = Callable[[int], None]
"""A function that any thread calls with the number of bytes written since the last call."""


class Blocks(Protocol):
    """A source of blocks."""

    def block(self, name: str, part: TensorSlice, room: "BlockBuffer") -> Any:
        """Return a part of a tensor in its output form: a contiguous array of raw numbers that the next call may overwrite."""
        ...


class BlockBuffer:
    """Memory that a single thread reuses for every block, because pages that have been touched before are faster."""

    def __init__(self) -> None:
        self._arrays: dict[str, Any] = {}

    def take(self, use: str, dtype: str, shape: tuple[int, ...]) -> Any:
        """Return an array of raw numbers, which shares its memory with earlier arrays for the same use."""
        size = tensor_bytes(dtype, shape)
        # Only ever grows, to the largest block of the use.
        if use not in self._arrays or self._arrays[use].nbytes < size:
            self._arrays[use] = np.empty(size, np.uint8)
        return self._arrays[use][:size].view(RAW[ITEMSIZE[dtype]]).reshape(shape)


class ThreadBuffer(threading.local):
    """A `BlockBuffer` for each thread that uses it."""

    def __init__(self) -> None:
        self.buffer = BlockBuffer()


def blocks_of(entry: Entry, limit: int = BLOCK_BYTES) -> Iterator[tuple[TensorSlice, int]]:
    """Split the rows of a tensor into blocks; yield each with the offset of its first byte. An empty tensor has no blocks."""
    dtype, shape = entry
    if 0 in shape:
        return
    if not shape:
        yield TensorSlice((), ()), 0
        return
    inner_offset = (0,) * (len(shape) - 1)
    row = tensor_bytes(dtype, shape[1:])
    # At least one row, which may exceed the limit.
    step = max(1, limit // max(1, row))
    for first in range(0, shape[0], step):
        yield TensorSlice((first, *inner_offset), (min(step, shape[0] - first), *shape[1:])), first * row


def copy_tensors(
    plan: FolderPlan, writer: FolderWriter, source: Blocks, workers: int, progress: ProgressCallback | None = None
) -> None:
    """Write every tensor of a plan.

    Args:
        plan: The plan of the files.
        writer: The writer that receives the blocks.
        source: The source of the blocks.
        workers: The number of threads.
        progress: Called with the size of each block in bytes, if given.

    Raises:
        CheckpointError: The source cannot be read. The first error ends all threads.
        OSError: The disk cannot be written.
    """
    local = ThreadBuffer()

    def copy_block(name: str, part: TensorSlice, start: int) -> None:
        block = source.block(name, part, local.buffer)
        writer.write(name, start, memoryview(block.reshape(-1)).cast("B"))
        if progress is not None:
            progress(block.nbytes)

    in_parallel(
        workers,
        (
            partial(copy_block, name, part, start)
            for tensors in plan.files.values()
            for name, entry in tensors.items()
            for part, start in blocks_of(entry)
        ),
    )

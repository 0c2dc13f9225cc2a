"""Host memory for many tensors, allocated in a few blocks.

torch's allocator of pinned memory rounds each tensor up to a power of two and keeps the memory when the tensor is freed, which takes up
to twice the memory that the tensors need. Blocks whose sizes are powers of two are not rounded. (The allocator's setting
`pinned_max_round_threshold_mb` does not help: in torch 2.13 it may return a block that is smaller than the tensor, because the blocks
of one free list need not have one size then.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_BYTES = 2**30
"""The size of a block; a larger tensor gets a larger block."""
ALIGNMENT = 512
"""The alignment of tensors in bytes, as in torch's allocators."""


def place(sizes: Sequence[int], block: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Place pieces of memory in blocks: the largest first, each in the first block that has room.

    Args:
        sizes: The sizes of the pieces in bytes.
        block: The size of a block in bytes, a power of two, for pieces that are not larger.

    Returns:
        The block and the offset of each piece, and the sizes of the blocks, powers of two.
    """
    places = [(0, 0)] * len(sizes)
    limits: list[int] = []
    used: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[number] + -sizes[number] % ALIGNMENT
        at = next((i for i, limit in enumerate(limits) if used[i] + size <= limit), len(limits))
        if at == len(limits):
            limits.append(max(block, _power_of_two(size)))
            used.append(0)
        places[number] = (at, used[at])
        used[at] += size
    # A block that is only partly filled shrinks to the next power of two.
    return places, [_power_of_two(size) for size in used]


def empty_together(likes: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
    """Return uninitialized tensors on the host, contiguous, with the shapes and dtypes of others.

    Args:
        likes: The tensors whose shapes and dtypes to use, on any device.
        pinned: Whether the memory is pinned.
    """
    places, sizes = place([t.numel() * t.itemsize for t in likes], BLOCK_BYTES)
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
    return [
        blocks[block][start : start + like.numel() * like.itemsize].view(like.dtype).view(like.shape)
        for like, (block, start) in zip(likes, places, strict=True)
    ]


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()

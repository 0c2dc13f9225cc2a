"""Copies from a GPU to host memory that is not pinned, such as shared memory, through two small pinned buffers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PIECE_BYTES = 4 * 2**20


class PinnedStaging:
    """Two small pinned buffers, and a stream that fills one of them while the other one is emptied.

    Without them, the driver copies to unpinned memory through a small buffer of its own, and the device waits for the host.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._filled = [torch.cuda.Event() for _ in range(2)]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes; both tensors `[bytes]` may change when this returns.

        Args:
            target: The host memory, uint8.
            source: The GPU memory, uint8.
        """
        # Kernels that compute the source may still be queued.
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        copy_in_pieces(target, source, self._pieces, self._fill, lambda number: self._filled[number].synchronize())

    def _fill(self, number: int, piece: Tensor, part: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            piece.copy_(part, non_blocking=True)
            self._filled[number].record()


def copy_in_pieces(
    target: Tensor,
    source: Tensor,
    pieces: Sequence[Tensor],
    fill: Callable[[int, Tensor, Tensor], None],
    wait: Callable[[int], None],
) -> None:
    """Copy bytes through two buffers, one of which is filled while the other one is emptied.

    Args:
        target: The target, `[bytes]` uint8.
        source: The source, `[bytes]` uint8.
        pieces: The two buffers, `[bytes]` uint8, of equal size.
        fill: Starts to copy a part of the source to the buffer with this number.
        wait: Waits until the buffer with this number is filled.
    """
    size = pieces[0].numel()
    sources, targets = source.split(size), target.split(size)
    # One round more than there are parts: each round fills one piece and then empties the one of the round before. A
    # piece is therefore empty when it is filled again, and all parts have been waited for at the end.
    for number in range(len(sources) + 1):
        if number < len(sources):
            part = sources[number]
            fill(number % 2, pieces[number % 2][: part.numel()], part)
        if number:
            former, emptied = (number - 1) % 2, targets[number - 1]
            wait(former)
            emptied.copy_(pieces[former][: emptied.numel()])

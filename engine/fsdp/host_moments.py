"""AdamW's moments on the host, streamed to the device part by part for the update.

While one part is updated, the next one is being copied to the device and the previous one back, so the step takes about as long as the
slower direction of the bus. Memory on the host is pinned and kept. The device has room for two parts during an update.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..pinned import empty_together

PART_BYTES = 2**29
"""The moments of a part."""
ALIGNMENT = 16
"""The alignment in bytes that kernels expect of a tensor."""


@dataclass(frozen=True)
class MomentSlice:
    """A range of a flattened tensor.

    Args:
        index: The tensor's number.
        start: The index of the first element.
        end: The index after the last element.
    """

    index: int
    start: int
    end: int


def parts_of(lengths: Sequence[int], limit: int) -> list[list[MomentSlice]]:
    """Cut tensors into parts of at most `limit` elements, in order. An empty tensor is also one slice.

    Args:
        lengths: The number of elements of each tensor.
        limit: The number of elements of a part.
    """
    parts: list[list[MomentSlice]] = []
    room = 0
    for index, length in enumerate(lengths):
        start = 0
        while True:
            # A full part is closed only if there are more elements, so an empty tensor joins the part before it.
            if not parts or (room == 0 and length > start):
                parts.append([])
                room = limit
            end = min(length, start + room)
            parts[-1].append(MomentSlice(index, start, end))
            room -= end - start
            start = end
            if start == length:
                break
    return parts


class HostMoments:
    """Moments of several tensors, divided into parts.

    Args:
        tensors: The tensors that have moments.
        kinds: The names of the moments.
        part_bytes: The size of a part.
        staged: Whether the moments are copied to the device for an update; by default if the tensors are not on the host.
    """

    def __init__(
        self, tensors: Sequence[Tensor], kinds: Sequence[str], part_bytes: int = PART_BYTES, staged: bool | None = None
    ) -> None:
        self._kinds = tuple(kinds)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._staged = self._device.type != "cpu" if staged is None else staged
        cuda = self._device.type == "cuda"
        largest = max((t.itemsize for t in tensors), default=1) * len(self._kinds)
        self.parts = parts_of([t.numel() for t in tensors], max(1, part_bytes // largest))
        moments = iter(empty_together([t for t in tensors for _ in self._kinds], pinned=cuda))
        self.host: list[dict[str, Tensor]] = [{kind: next(moments).zero_() for kind in self._kinds} for _ in tensors]
        """The moments of each tensor, by kind."""
        self._to_device: Any = torch.cuda.Stream(self._device) if cuda else None
        self._to_host: Any = torch.cuda.Stream(self._device) if cuda else None

    def of(self, piece: MomentSlice) -> dict[str, Tensor]:
        """Return the moments of a piece on the host, by kind: flat views."""
        return {kind: whole.view(-1)[piece.start : piece.end] for kind, whole in self.host[piece.index].items()}

    def update(self, step: Callable[[int, list[dict[str, Tensor]]], None]) -> None:
        """Call a function with the moments of each part in turn, on the device, and store the updated moments.

        Args:
            step: Takes a part's number and the moments of its slices, and updates them in place.
        """
        if not self._staged:
            for number, part in enumerate(self.parts):
                step(number, [self.of(piece) for piece in part])
            return
        size = max((sum(self._bytes(piece) for piece in part) for part in self.parts), default=0)
        slots = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(min(2, len(self.parts)))]
        if self._to_device is not None:
            # The memory of the slots may just have been freed by other work on this stream.
            self._to_device.wait_stream(torch.cuda.current_stream(self._device))
        try:
            arrived = [self._fetch(0, slots)] if self.parts else []
            for number in range(len(self.parts)):
                if number + 1 < len(self.parts):
                    # The next part uses the slot of the previous part, which must be back on the host first.
                    if self._to_device is not None:
                        self._to_device.wait_stream(self._to_host)
                    arrived.append(self._fetch(number + 1, slots))
                moments, event = arrived[number]
                if event is not None:
                    torch.cuda.current_stream(self._device).wait_event(event)
                step(number, moments)
                self._store(number, moments)
        finally:
            if self._to_host is not None:
                # Checkpoints read the moments on the host without waiting for a stream, and the slots are freed here.
                self._to_device.synchronize()
                self._to_host.synchronize()

    def _fetch(self, number: int, slots: list[Tensor]) -> tuple[list[dict[str, Tensor]], Any]:
        """Start copying a part to its slot; return its moments there, and the event of their arrival."""
        # Two slots in turn.
        slot, at = slots[number % len(slots)], 0
        moments: list[dict[str, Tensor]] = []
        with self._on(self._to_device):
            for piece in self.parts[number]:
                views = {}
                for kind, source in self.of(piece).items():
                    size = source.numel() * source.itemsize
                    views[kind] = slot[at : at + size].view(source.dtype)
                    views[kind].copy_(source, non_blocking=True)
                    at += size + -size % ALIGNMENT
                moments.append(views)
            event = None if self._to_device is None else self._to_device.record_event()
        return moments, event

    def _store(self, number: int, moments: list[dict[str, Tensor]]) -> None:
        """Start copying a part back, once its update is done."""
        if self._to_host is not None:
            self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        with self._on(self._to_host):
            for piece, views in zip(self.parts[number], moments, strict=True):
                for kind, target in self.of(piece).items():
                    target.copy_(views[kind], non_blocking=True)

    def _bytes(self, piece: MomentSlice) -> int:
        sizes = [t.numel() * t.itemsize for t in self.of(piece).values()]
        return sum(size + -size % ALIGNMENT for size in sizes)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

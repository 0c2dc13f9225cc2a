"""AdamW's moments on the host, brought to the device a part at a time for the update.

While one part is updated, the next one is on its way to the device and the previous one on its way back, so the step takes about as
long as the slower direction of the bus. The buffers exist from the start: pinned memory on the host, and two parts on the device.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

PART_BYTES = 2**29
"""The moments of a part."""


def parts_of(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return consecutive indices in parts of at most `limit` bytes; a larger one is a part of its own."""
    parts: list[list[int]] = []
    filled = 0
    for i, size in enumerate(sizes):
        if not parts or filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(i)
        filled += size
    return parts


class HostMoments:
    """Moments of several tensors, in parts.

    Args:
        tensors: What has moments; a device of theirs other than the host has two buffers for parts.
        kinds: The names of the moments.
        limit: The size of a part in bytes.
        staged: Whether the moments are copied for an update; by default if the tensors are not on the host.
    """

    def __init__(
        self, tensors: Sequence[Tensor], kinds: Sequence[str], limit: int = PART_BYTES, staged: bool | None = None
    ) -> None:
        self.kinds = tuple(kinds)
        self.device = tensors[0].device if tensors else torch.device("cpu")
        cuda = self.device.type == "cuda"
        self.parts = parts_of([len(self.kinds) * t.numel() * t.itemsize for t in tensors], limit)
        self.host: list[dict[str, Tensor]] = [
            {kind: torch.zeros(t.shape, dtype=t.dtype, pin_memory=cuda) for kind in self.kinds} for t in tensors
        ]
        """The moments of each tensor, by kind."""
        self._to_device: Any = torch.cuda.Stream(self.device) if cuda else None
        self._to_host: Any = torch.cuda.Stream(self.device) if cuda else None
        self._slots: list[Tensor] = []
        if (self.device.type != "cpu") if staged is None else staged:
            largest = max((sum(self._bytes(i) for i in part) for part in self.parts), default=0)
            self._slots = [torch.empty(largest, dtype=torch.uint8, device=self.device) for _ in range(min(2, len(self.parts)))]

    def update(self, step: Callable[[int, list[dict[str, Tensor]]], None]) -> None:
        """Call a function with the moments of each part in turn, on the device, and keep what it makes of them.

        Args:
            step: Takes a part's number and the moments of its tensors, and changes them in place.
        """
        if not self._slots:
            for number, part in enumerate(self.parts):
                step(number, [self.host[i] for i in part])
            return
        if self._to_device is not None:
            # What last used the buffers, and the memory that they are in, was on this stream.
            self._to_device.wait_stream(torch.cuda.current_stream(self.device))
        arrived = [self._fetch(0)]
        for number in range(len(self.parts)):
            if number + 1 < len(self.parts):
                # Its slot is that of the part before this one, which has to be back on the host.
                self._wait(self._to_device, self._to_host)
                arrived.append(self._fetch(number + 1))
            self._wait_event(arrived[number][1])
            step(number, arrived[number][0])
            self._store(number, arrived[number][0])
        if self._to_host is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._to_host)
            # A checkpoint reads the moments on the host, which does not wait for streams.
            self._to_host.synchronize()

    def _fetch(self, number: int) -> tuple[list[dict[str, Tensor]], Any]:
        """Start copying a part to its slot; return its moments there, and what tells that they have arrived."""
        slot, at = self._slots[number % len(self._slots)], 0
        moments: list[dict[str, Tensor]] = []
        with self._on(self._to_device):
            for i in self.parts[number]:
                views = {}
                for kind, source in self.host[i].items():
                    size = source.numel() * source.itemsize
                    views[kind] = slot[at : at + size].view(source.dtype).view(source.shape)
                    views[kind].copy_(source, non_blocking=True)
                    at += size + -size % 16
                moments.append(views)
            event = None if self._to_device is None else self._to_device.record_event()
        return moments, event

    def _store(self, number: int, moments: list[dict[str, Tensor]]) -> None:
        """Start copying a part back, once its update is done."""
        if self._to_host is not None:
            self._to_host.wait_stream(torch.cuda.current_stream(self.device))
        with self._on(self._to_host):
            for i, views in zip(self.parts[number], moments, strict=True):
                for kind, value in views.items():
                    self.host[i][kind].copy_(value, non_blocking=True)

    def _bytes(self, i: int) -> int:
        sizes = [t.numel() * t.itemsize for t in self.host[i].values()]
        return sum(size + -size % 16 for size in sizes)

    def _wait(self, stream: Any, other: Any) -> None:
        if stream is not None:
            stream.wait_stream(other)

    def _wait_event(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

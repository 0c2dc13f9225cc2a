"""Where an engine's parameters, gradients and optimizer state are: on the device, or resting on the host."""

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from .errors import ConfigError

Part = Literal["params", "grads", "optimizer"]
Where = Literal["device", "host"]
PARTS: tuple[Part, ...] = ("params", "grads", "optimizer")


def peak_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated on a GPU, or resident of this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Residency:
    """Keeps count of where each part is, and moves parts through the backend.

    Args:
        move: moves one part; called only when the part is elsewhere.
    """

    def __init__(self, move: Callable[[Part, Where], None]) -> None:
        self._move = move
        self._where: dict[Part, Where] = dict.fromkeys(PARTS, "device")

    def where(self, part: Part) -> Where:
        """Where a part is."""
        return self._where[part]

    def to(self, place: str, parts: tuple[Part, ...]) -> None:
        """Bring parts to a place.

        Raises:
            ConfigError: the place is not one of `device` and `host`.
        """
        if place not in ("device", "host"):
            raise ConfigError(f"to({place!r}): state can be on 'device' or 'host'")
        target: Where = "host" if place == "host" else "device"
        for part in parts:
            if self._where[part] != target:
                self._move(part, target)
                self._where[part] = target

    @contextmanager
    def on_device(self, parts: tuple[Part, ...]) -> Iterator[None]:
        """Bring parts to the device, and back to where each of them was at the end."""
        before = dict(self._where)
        self.to("device", parts)
        try:
            yield
        finally:
            for part in parts:
                self.to(before[part], (part,))

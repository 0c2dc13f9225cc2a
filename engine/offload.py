"""Where an engine's parameters, gradients and optimizer state are: on the device, or resting on the host or on disk.

What rests is the memory, not the tensors: a storage is copied away and made empty, and filled again when it is needed. So
every view of it, in a model, in an optimizer, in a flat buffer, is what it was, on any backend.
"""

import ctypes
import gc
import resource
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .checkpoint.local_shards import host_bytes
from .errors import ConfigError

Part = Literal["params", "grads", "optimizer"]
Place = Literal["device", "host", "disk"]
PARTS: tuple[Part, ...] = ("params", "grads", "optimizer")
PLACES: tuple[Place, ...] = ("device", "host", "disk")


def peak_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated on a GPU, or resident of this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True, kw_only=True)
class _Resting:
    """A storage that is elsewhere."""

    storage: torch.UntypedStorage
    size: int
    copy: Tensor | IO[bytes]


class Residency:
    """Keeps count of where each part is, and moves parts.

    Args:
        tensors: of a part, sharing the memory that is to be moved; asked whenever the part leaves the device.
    """

    def __init__(self, tensors: Callable[[Part], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._where: dict[Part, Place] = dict.fromkeys(PARTS, "device")
        self._resting: dict[Part, list[_Resting]] = {part: [] for part in PARTS}

    def where(self, part: Part) -> Place:
        """Where a part is."""
        return self._where[part]

    def to(self, place: str, parts: tuple[Part, ...]) -> None:
        """Bring parts to a place.

        Raises:
            ConfigError: there is no such place, or the disk has no room; everything is on the device then.
        """
        target = next((p for p in PLACES if p == place), None)
        if target is None:
            raise ConfigError(f"to({place!r}): state can be on {', '.join(map(repr, PLACES))}")
        for part in parts:
            if self._where[part] != target:
                self._wake(part)
                if target != "device":
                    self._rest(part, target)
                    _trim()
                self._where[part] = target

    @contextmanager
    def on_device(self, parts: tuple[Part, ...]) -> Iterator[bool]:
        """Bring parts to the device, and back to where each of them was at the end; whether any was elsewhere."""
        before = dict(self._where)
        self.to("device", parts)
        try:
            yield any(before[part] != "device" for part in parts)
        finally:
            for part in parts:
                self.to(before[part], (part,))

    def close(self) -> None:
        """Forget what rests."""
        for resting in (r for rests in self._resting.values() for r in rests):
            if not isinstance(resting.copy, Tensor):
                resting.copy.close()
        self._resting = {part: [] for part in PARTS}

    def _rest(self, part: Part, place: Place) -> None:
        # Megatron's optimizer updates the parameters in place where they are float32: that memory is theirs, and is moved once.
        others = {
            _key(t) for other in PARTS if other != part and part == "optimizer" for t in map(_local, self._tensors(other))
        }
        seen: set[int] = set()
        for tensor in map(_local, self._tensors(part)):
            storage, key = tensor.untyped_storage(), _key(tensor)
            size = storage.nbytes()
            if key in seen or key in others or not size or (place == "host" and tensor.device.type == "cpu"):
                continue
            seen.add(key)
            try:
                copy = self._copy(_bytes(storage), place)
            except OSError as e:
                self._wake(part)
                raise ConfigError(
                    f"to({place!r}): {e.strerror or e} in {tempfile.gettempdir()}; set TMPDIR to a disk with room, or use 'host'"
                ) from e
            storage.resize_(0)
            self._resting[part].append(_Resting(storage=storage, size=size, copy=copy))

    def _copy(self, data: Tensor, place: Place) -> Tensor | IO[bytes]:
        if place == "host":
            held = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
            held.copy_(data)
            return held
        # Without a name: it goes with this process, however that ends.
        file: IO[bytes] = tempfile.TemporaryFile(prefix="drivetrain-")
        try:
            file.write(host_bytes(data))
            file.flush()
        except OSError:
            file.close()
            raise
        return file

    def _wake(self, part: Part) -> None:
        while self._resting[part]:
            resting = self._resting[part][-1]
            resting.storage.resize_(resting.size)
            data = _bytes(resting.storage)
            if isinstance(resting.copy, Tensor):
                data.copy_(resting.copy)
            else:
                held = data if data.device.type == "cpu" else torch.empty(data.shape, dtype=data.dtype)
                resting.copy.seek(0)
                resting.copy.readinto(host_bytes(held))  # type: ignore[attr-defined]
                if held is not data:
                    data.copy_(held)
                resting.copy.close()
            self._resting[part].pop()
        self._where[part] = "device"


def free_memory(device: torch.device) -> None:
    """Give back the memory of models and optimizers that nobody uses any more: modules, their hooks and FSDP's state refer to each
    other in circles, which only a garbage collection takes apart.

    Args:
        device: whose memory the tensors are in.
    """
    gc.collect()
    # Emptying the allocator's cache waits for the device, which after an error may be in a collective that never ends.
    if device.type == "cuda" and sys.exc_info()[0] is None:
        torch.cuda.empty_cache()


def _trim() -> None:
    """Give freed memory of the host back to the system: glibc keeps blocks for itself once larger ones have been freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The whole memory of a storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

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
from .torch_private import storage_key

Part = Literal["params", "grads", "optimizer"]
Location = Literal["device", "host", "disk"]
PARTS: tuple[Part, ...] = ("params", "grads", "optimizer")
LOCATIONS: tuple[Location, ...] = ("device", "host", "disk")


def peak_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated on a GPU, or resident of this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True, kw_only=True)
class _Offloaded:
    """A storage that is elsewhere."""

    storage: torch.UntypedStorage
    size: int
    copy: Tensor | IO[bytes]


class Offloader:
    """Keeps count of where each part is, and moves parts.

    Args:
        tensors: of a part, sharing the memory that is to be moved; asked whenever the part leaves the device.
    """

    def __init__(self, tensors: Callable[[Part], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._location: dict[Part, Location] = dict.fromkeys(PARTS, "device")
        self._offloaded: dict[Part, list[_Offloaded]] = {part: [] for part in PARTS}

    def location_of(self, part: Part) -> Location:
        """Where a part is."""
        return self._location[part]

    def to(self, location: str, parts: tuple[Part, ...]) -> None:
        """Bring parts to a place.

        Raises:
            ConfigError: there is no such place, or the disk has no room; everything is on the device then.
        """
        target = next((p for p in LOCATIONS if p == location), None)
        if target is None:
            raise ConfigError(f"to({location!r}): state can be on {', '.join(map(repr, LOCATIONS))}")
        for part in parts:
            if self._location[part] != target:
                self._reload(part)
                if target != "device":
                    self._offload(part, target)
                    _trim()
                self._location[part] = target

    @contextmanager
    def on_device(self, parts: tuple[Part, ...]) -> Iterator[bool]:
        """Bring parts to the device, and back to where each of them was at the end; whether any was elsewhere."""
        before = dict(self._location)
        self.to("device", parts)
        try:
            yield any(before[part] != "device" for part in parts)
        finally:
            for part in parts:
                self.to(before[part], (part,))

    def close(self) -> None:
        """Forget what rests."""
        for offloaded in (r for storages in self._offloaded.values() for r in storages):
            if not isinstance(offloaded.copy, Tensor):
                offloaded.copy.close()
        self._offloaded = {part: [] for part in PARTS}

    def _offload(self, part: Part, location: Location) -> None:
        # Megatron's optimizer updates the parameters in place where they are float32: that memory is theirs, and is moved once.
        others = {
            storage_key(t)
            for other in PARTS
            if other != part and part == "optimizer"
            for t in map(_local, self._tensors(other))
        }
        seen: set[int] = set()
        for tensor in map(_local, self._tensors(part)):
            storage, key = tensor.untyped_storage(), storage_key(tensor)
            size = storage.nbytes()
            if key in seen or key in others or not size or (location == "host" and tensor.device.type == "cpu"):
                continue
            seen.add(key)
            try:
                copy = self._copy(_bytes(storage), location)
            except OSError as e:
                self._reload(part)
                raise ConfigError(
                    f"to({location!r}): {e.strerror or e} in {tempfile.gettempdir()}; set TMPDIR to a disk with room, or use 'host'"
                ) from e
            storage.resize_(0)
            self._offloaded[part].append(_Offloaded(storage=storage, size=size, copy=copy))

    def _copy(self, data: Tensor, location: Location) -> Tensor | IO[bytes]:
        if location == "host":
            host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
            host.copy_(data)
            return host
        # Without a name: it goes with this process, however that ends.
        file: IO[bytes] = tempfile.TemporaryFile(prefix="drivetrain-")
        try:
            file.write(host_bytes(data))
            file.flush()
        except OSError:
            file.close()
            raise
        return file

    def _reload(self, part: Part) -> None:
        while self._offloaded[part]:
            offloaded = self._offloaded[part][-1]
            offloaded.storage.resize_(offloaded.size)
            data = _bytes(offloaded.storage)
            if isinstance(offloaded.copy, Tensor):
                data.copy_(offloaded.copy)
            else:
                host = data if data.device.type == "cpu" else torch.empty(data.shape, dtype=data.dtype)
                offloaded.copy.seek(0)
                offloaded.copy.readinto(host_bytes(host))  # type: ignore[attr-defined]
                if host is not data:
                    data.copy_(host)
                offloaded.copy.close()
            self._offloaded[part].pop()
        self._location[part] = "device"


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


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The whole memory of a storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

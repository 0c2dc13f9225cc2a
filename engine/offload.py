"""Offloading of an engine's parameters, gradients and optimizer state from the device to the host or to disk.

Storages are offloaded, not tensors: a storage is copied and resized to zero, and restored when it is needed. All views of it,
in a model, an optimizer or a flat buffer, therefore remain valid on any backend.
"""

import ctypes
import gc
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .checkpoint.local_shards import host_bytes
from .errors import ConfigError
from .pinned import empty_together
from .torch_private import storage_key

StatePart = Literal["params", "grads", "optimizer"]
Location = Literal["device", "host", "disk"]
PARTS: tuple[StatePart, ...] = ("params", "grads", "optimizer")
LOCATIONS: tuple[Location, ...] = ("device", "host", "disk")


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory usage so far: allocated memory on a GPU, or this process's resident memory without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux reports KiB, macOS reports bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_bytes(device: torch.device, processes: int) -> float:
    """Return the memory that an engine may use, in bytes: the free memory of a GPU or, without one, a share of the machine's.

    Args:
        device: This process's device.
        processes: The number of processes that share the machine.
    """
    if device.type == "cuda":
        # Unused memory that torch's allocator holds is free as well.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    # The physical memory of the machine, unless the control group of a container allows less.
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    with suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        limits.append(float(int(Path("/sys/fs/cgroup/memory.max").read_text())))
    return min(limits) / processes


def host_cores(processes: int) -> int:
    """Return the number of cores that a process may use, at least 1.

    Args:
        processes: The number of processes that share the cores which this one may run on.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity is not None else os.cpu_count() or 1)
    with suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))
    return max(1, int(cores) // processes)


@contextmanager
def host_threads(count: int) -> Iterator[None]:
    """Use `count` CPU threads inside the block. No-op if OMP_NUM_THREADS is set to anything other than the launcher's 1."""
    before = torch.get_num_threads()
    if before > 1 or count == 1:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(kw_only=True)
class _Offloaded:
    """An offloaded storage and its copy; a copy of None stands for zeros."""

    storage: torch.UntypedStorage
    size: int
    copy: Tensor | IO[bytes] | None

    def drop(self) -> None:
        """Drop the copy; the storage then becomes zeros."""
        if self.copy is not None and not isinstance(self.copy, Tensor):
            self.copy.close()
        self.copy = None


class Offloader:
    """Mover of the parts of an engine's state, which tracks their locations.

    Args:
        tensors: A function that returns tensors over all memory of a part. It is called whenever the part is offloaded.
    """

    def __init__(self, tensors: Callable[[StatePart], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._location: dict[StatePart, Location] = dict.fromkeys(PARTS, "device")
        self._offloaded: dict[StatePart, list[_Offloaded]] = {part: [] for part in PARTS}
        self.gradients_are_zero = False
        """Whether the gradients are all zero; then they are not copied."""

    def location_of(self, part: StatePart) -> Location:
        """Return the location of a part."""
        return self._location[part]

    def bytes_of(self, part: StatePart) -> int:
        """Return the size of a part, wherever it is."""
        return sum(tensor.numel() * tensor.itemsize for tensor in map(_local, self._tensors(part)))

    def to(self, location: str, parts: tuple[StatePart, ...]) -> None:
        """Move parts to a location. Parameters come first and leave last, because the other parts belong to them.

        Args:
            location: The location: `device`, `host` or `disk`.
            parts: The parts to move, in the order of `PARTS`.

        Raises:
            ConfigError: The location is unknown, or the disk is full; the part that did not fit is then on the device.
        """
        target = next((p for p in LOCATIONS if p == location), None)
        if target is None:
            raise ConfigError(f"to({location!r}): state can be moved to {', '.join(map(repr, LOCATIONS))}")
        for part in parts if target == "device" else reversed(parts):
            if self._location[part] != target:
                # A part moves between host and disk through the device: its storages are restored there first.
                self._reload(part)
                if target != "device":
                    self._offload(part, target)
                    _trim()
                    if self._offloaded[part] and self._offloaded[part][0].storage.device.type == "cuda":
                        # Otherwise torch's allocator would keep the memory, which is freed for other programs and allocators.
                        torch.cuda.empty_cache()
                self._location[part] = target

    @contextmanager
    def on_device(self, parts: tuple[StatePart, ...]) -> Iterator[bool]:
        """Move parts to the device and, at the end, back to their locations. Yields whether any part was not on the device."""
        before = dict(self._location)
        self.to("device", parts)
        try:
            yield any(before[part] != "device" for part in parts)
        finally:
            for part in parts:
                self.to(before[part], (part,))

    def close(self) -> None:
        """Drop all offloaded copies."""
        for offloaded in (o for storages in self._offloaded.values() for o in storages):
            offloaded.drop()
        self._offloaded = {part: [] for part in PARTS}

    def discard_gradients(self) -> None:
        """Replace the gradients, by zeros, wherever they are. On the device this only takes effect once the engine has zeroed them."""
        self.gradients_are_zero = True
        for offloaded in self._offloaded["grads"]:
            offloaded.drop()

    def _offload(self, part: StatePart, location: Location) -> None:
        # Megatron's optimizer updates float32 parameters in place, so it shares their memory, which belongs to the parameters
        # and is moved only once.
        others = {
            storage_key(t)
            for other in PARTS
            if other != part and part == "optimizer"
            for t in map(_local, self._tensors(other))
        }
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in map(_local, self._tensors(part)):
            key = storage_key(tensor)
            if key not in others and tensor.untyped_storage().nbytes() and not (location == "host" and tensor.is_cpu):
                storages[key] = tensor.untyped_storage()
        data = [_bytes(storage) for storage in storages.values()]
        zero = part == "grads" and self.gradients_are_zero
        host = empty_together(data, pinned=True) if location == "host" and not zero else []
        for number, storage in enumerate(storages.values()):
            try:
                copy = None if zero else host[number].copy_(data[number]) if host else self._write(data[number])
            except OSError as e:
                self._reload(part)
                raise ConfigError(
                    f"to({location!r}): {e.strerror or e} in {tempfile.gettempdir()}; set TMPDIR to a disk with "
                    "enough space, or use 'host'"
                ) from e
            self._offloaded[part].append(_Offloaded(storage=storage, size=storage.nbytes(), copy=copy))
            # Without `non_blocking`, `copy_` has waited for the device, so the copy is complete here.
            storage.resize_(0)

    @staticmethod
    def _write(data: Tensor) -> IO[bytes]:
        """Write bytes to a file without a name, which disappears with this process, however that ends."""
        file: IO[bytes] = tempfile.TemporaryFile(prefix="drivetrain-")
        try:
            file.write(host_bytes(data))
            file.flush()
        except OSError:
            file.close()
            raise
        return file

    def _reload(self, part: StatePart) -> None:
        while self._offloaded[part]:
            # The entry is removed only after its data are restored, so that an error in between loses nothing.
            offloaded = self._offloaded[part][-1]
            offloaded.storage.resize_(offloaded.size)
            data = _bytes(offloaded.storage)
            if offloaded.copy is None:
                data.zero_()
            elif isinstance(offloaded.copy, Tensor):
                data.copy_(offloaded.copy)
            else:
                # A file is read into host memory only; the storage of a CPU engine is such memory itself.
                host = data if data.device.type == "cpu" else torch.empty(data.shape, dtype=data.dtype)
                offloaded.copy.seek(0)
                offloaded.copy.readinto(host_bytes(host))  # type: ignore[attr-defined]
                if host is not data:
                    data.copy_(host)
                offloaded.copy.close()
            self._offloaded[part].pop()
        self._location[part] = "device"


def free_memory(device: torch.device) -> None:
    """Free the memory of models and optimizers that are no longer in use.

    Modules, their hooks and FSDP's state form reference cycles, which only a garbage collection breaks.

    Args:
        device: The device whose memory is freed.
    """
    gc.collect()
    # Emptying the allocator's cache waits for the device, which may be stuck in a collective after an error.
    if device.type == "cuda" and sys.exc_info()[0] is None:
        torch.cuda.empty_cache()


def _trim() -> None:
    """Return freed host memory to the system. glibc otherwise keeps free blocks once larger ones have been freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return a view of a storage's entire memory, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

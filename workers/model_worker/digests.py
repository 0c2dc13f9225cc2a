"""Digests of tensors on their way from one role to another, by which both ends know that the same bytes left and arrived."""

import torch
import xxhash
from torch import Tensor

from ...engine.checkpoint.local_shards import host_bytes

WORDS = 2**22
"""The number of words of a tensor on a device that are summed up at a time."""


class Tally:
    """The digest of a stream of tensors: of their names, and of the bytes of each."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, str | Tensor]] = []
        self.bytes = 0
        """The size of all tensors so far."""

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, name: str, tensor: Tensor) -> str:
        """Add a tensor; return its digest if it is in host memory, and otherwise nothing, so that the device is not waited for."""
        self.bytes += tensor.numel() * tensor.itemsize
        part = host_digest(tensor) if tensor.device.type == "cpu" else device_sums(tensor)
        self._parts.append((name, part))
        return part if isinstance(part, str) else ""

    def digest(self) -> str:
        """Return the digest of all tensors, in their order."""
        hasher = xxhash.xxh3_128()
        for name, part in self._parts:
            text = part if isinstance(part, str) else " ".join(map(str, part.tolist()))
            hasher.update(f"{name} {text}\n".encode())
        return hasher.hexdigest()


def host_digest(tensor: Tensor) -> str:
    """Return the digest of the bytes of a tensor in host memory."""
    return xxhash.xxh3_64_hexdigest(host_bytes(_bytes(tensor)))


def device_sums(tensor: Tensor) -> Tensor:
    """Return two sums `[2]` int64 over the bytes of a tensor on a device, of which the second depends on their order.

    Integers overflow alike everywhere, so equal bytes have equal sums.
    """
    data = _bytes(tensor)
    whole = data.numel() // 8 * 8
    # The bytes that are left over are words of their own.
    words = [data[:whole].view(torch.int64), data[whole:].to(torch.int64)]
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    first = 0
    for part in (chunk for group in words for chunk in group.split(WORDS)):
        places = torch.arange(first, first + part.numel(), device=tensor.device) * 2 + 1
        sums += torch.stack([part.sum(), (part * places).sum()])
        first += part.numel()
    return sums


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)

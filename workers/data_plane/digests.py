"""Digests of tensors sent from one role to another, which let both ends verify that the received bytes equal the sent ones."""

import torch
import xxhash
from torch import Tensor

from ...engine.checkpoint.local_shards import host_bytes

WORDS = 2**22
"""The number of words of a tensor on a device that are summed up at a time."""


class StreamDigest:
    """The digest of a stream of tensors: of their names, types and shapes, and of the bytes of each.

    Args:
        in_host: Whether the digest is that of bytes in host memory also for tensors on a device, because they are compared with what
            arrives there. Digests of the two kinds cannot be compared.
    """

    def __init__(self, *, in_host: bool) -> None:
        self._in_host = in_host
        self._parts: list[tuple[str, str | Tensor]] = []
        self.bytes = 0
        """The size of all tensors so far."""

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, name: str, tensor: Tensor) -> str:
        """Add a tensor; return the digest of its bytes if it is computed in host memory, and otherwise nothing, so that the device is
        not waited for.
        """
        self.bytes += tensor.numel() * tensor.itemsize
        part = host_digest(tensor.cpu()) if self._in_host or is_in_host(tensor) else device_sums(tensor)
        self._parts.append((f"{name} {tensor.dtype} {list(tensor.shape)}", part))
        return part if isinstance(part, str) else ""

    def digest(self) -> str:
        """Return the digest of all tensors, in their order."""
        hasher = xxhash.xxh3_128()
        for about, part in self._parts:
            # The host waits for the device only here.
            text = part if isinstance(part, str) else " ".join(map(str, part.tolist()))
            hasher.update(f"{about} {text}\n".encode())
        return hasher.hexdigest()


def is_in_host(tensor: Tensor) -> bool:
    """Return whether a tensor is in host memory."""
    return tensor.device.type == "cpu"


def host_digest(tensor: Tensor) -> str:
    """Return the digest of the bytes of a tensor in host memory."""
    return xxhash.xxh3_64_hexdigest(host_bytes(_bytes(tensor)))


def device_sums(tensor: Tensor) -> Tensor:
    """Return two sums `[2]` int64 over the bytes of a tensor on a device, of which the second depends on their order.

    Each word of 8 bytes is first mixed by a function that no two words share, as in MurmurHash3's finalizer, so that changes of several
    words, such as of their signs, do not cancel. Integers overflow alike everywhere, so equal bytes have equal sums.
    """
    data = _bytes(tensor)
    if data.storage_offset() % 8:
        # A word has to begin at a multiple of its size.
        data = data.clone()
    whole = data.numel() // 8 * 8
    # The bytes that are left over are words of their own.
    words = [data[:whole].view(torch.int64), data[whole:].to(torch.int64)]
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    first = 0
    # In chunks, because every operation below allocates a tensor of the size of its input.
    for part in (chunk for group in words for chunk in group.split(WORDS)):
        mixed = _mixed(part)
        # Odd factors: multiplication by an even one modulo 2**64 would lose the high bits of a word.
        places = torch.arange(first, first + part.numel(), device=tensor.device) * 2 + 1
        sums += torch.stack([mixed.sum(), (mixed * places).sum()])
        first += part.numel()
    return sums


def _mixed(words: Tensor) -> Tensor:
    # MurmurHash3's 0xFF51AFD7ED558CCD and 0xC4CEB9FE1A85EC53, as the int64 numbers of the same bits.
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD):
        # torch shifts signed integers, which repeats their sign.
        words = (words ^ (words >> 33 & 0x7FFFFFFF)) * factor
    return words ^ (words >> 33 & 0x7FFFFFFF)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)

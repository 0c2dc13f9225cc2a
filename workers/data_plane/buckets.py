"""Tensors that are sent together, packed into one piece of memory, and the channels between processes that carry them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.errors import ConfigError, RemoteError
from ...engine.parallel.process_groups import EngineGroups
from .blocks import CAN_SHARE, Block, BlockPool, BlockReader, InFlight, SharedBlock
from .digests import StreamDigest
from .links import CHUNK_BYTES, Links
from .plan import ITEM_SIZES, aligned
from .store import DTYPE_NAMES, DTYPES

BUCKET_BYTES = 8 * 2**20
"""Size of a bucket, unless a single tensor is larger."""
ADDRESS = 8
"""Memory of tensors begins at a multiple of this many bytes."""
PATIENCE_S = 10.0
"""The time limit for memory in flight to become free, in seconds. A target that does not read for this long may have failed; new memory is
then allocated until a block is returned."""

_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Tensors that are sent together, or the end of a stream of them.

    Args:
        contents: Name, data type, shape and digest of each tensor; empty at the end.
        data: Their bytes `[bytes]`, aligned for any data type.
        block: The block of memory that starts with these bytes.
        total: At the end, the digest of all tensors.
        error: At the end, why the source failed.
    """

    contents: Sequence[tuple[str, str, tuple[int, ...], str]] = ()
    data: Tensor = field(default=_NOTHING, repr=False)
    block: Block | None = field(default=None, repr=False)
    total: str = ""
    error: str = ""

    def tensors(self) -> Iterator[tuple[str, Tensor, str]]:
        """Yield the name, the tensor and the digest of each."""
        spans, _ = _spans(self.contents)
        for (name, dtype, shape, digest), (begin, end) in zip(self.contents, spans, strict=True):
            yield name, self.data[begin:end].view(DTYPES[dtype]).view(shape), digest


def _spans(contents: Sequence[tuple[str, str, tuple[int, ...], str]]) -> tuple[list[tuple[int, int]], int]:
    return aligned(torch.Size(shape).numel() * ITEM_SIZES[dtype] for _, dtype, shape, _ in contents)


class BucketChannel(Protocol):
    """One way from a process to others."""

    @property
    def shares_memory(self) -> bool:
        """Whether the process that receives can read a shared block itself."""
        ...

    def send(self, bucket: Bucket) -> InFlight | None:
        """Send a bucket; return a handle to wait until its memory may change, or None if it may change immediately."""
        ...

    def receive(self) -> Bucket:
        """Return the next bucket.

        Raises:
            RemoteError: The source failed.
        """
        ...


class BroadcastChannel:
    """Within a pool.

    Args:
        groups: The groups of this transfer.
        source: The rank that sends.
        targets: The ranks that receive.
    """

    shares_memory = False

    def __init__(self, groups: EngineGroups, source: int, targets: Sequence[int]) -> None:
        self._source = source
        # Buckets are in host memory, so gloo carries them in pools on GPUs too.
        self._group = groups.get([source, *targets], "gloo")

    def send(self, bucket: Bucket) -> None:
        """Send a bucket to all."""
        # Two collectives: the receivers allocate memory of the size that the first one implies, and skip the second one
        # if it is 0.
        dist.broadcast_object_list([bucket.contents, bucket.total, bucket.error], src=self._source, group=self._group)
        if bucket.data.numel():
            dist.broadcast(bucket.data, src=self._source, group=self._group)

    def receive(self) -> Bucket:
        """Return the next bucket; see `BucketChannel`."""
        header: list[Any] = [None] * 3
        dist.broadcast_object_list(header, src=self._source, group=self._group)
        contents, total, error = header
        if error:
            raise RemoteError(error)
        _, size = _spans(contents)
        data = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.broadcast(data, src=self._source, group=self._group)
        return Bucket(contents=contents, data=data, total=total)


class LinkChannel:
    """Between pools. On one machine the target reads the source's memory.

    Args:
        links: The connections of this process.
        reader: Opens the memory of other processes.
        source: The worker that sends.
        target: The worker that receives.
        title: What is sent.
    """

    def __init__(self, links: Links, reader: BlockReader, source: str, target: str, title: str) -> None:
        self._links, self._reader = links, reader
        self._source, self._target, self._title = source, target, title

    @property
    def shares_memory(self) -> bool:
        """Whether both processes are on one machine."""
        return CAN_SHARE and self._links.is_same_host(self._target)

    def send(self, bucket: Bucket) -> InFlight:
        """Send a bucket. Its memory must not change before it has been sent."""
        if isinstance(bucket.block, SharedBlock) and bucket.data.numel() and self.shares_memory:
            reading = bucket.block.lend()
            address = (*bucket.block.address, bucket.data.numel())
            self._links.send(self._target, self._title, [], about=[bucket.contents, bucket.total], block=address)
            return reading
        pieces = [bucket.data.numpy()] if bucket.data.numel() else []
        about = [bucket.contents, bucket.total]
        return self._links.send(self._target, self._title, pieces, about=about, error=bucket.error)

    def receive(self) -> Bucket:
        """Return the next bucket; see `BucketChannel`."""
        header = self._links.receive_header(self._source, self._title)
        if header.error:
            raise RemoteError(header.error)
        contents, total = header.about
        if header.block is not None:
            # Only the address has traveled; the tensors are views of the source's memory.
            data = self._reader.read(*header.block)
        elif 0 < header.size <= CHUNK_BYTES:
            data = torch.frombuffer(self._links.receive_chunk(header), dtype=torch.uint8)
            # The memory is that of ZeroMQ's message, which begins anywhere.
            if data.data_ptr() % ADDRESS:
                data = data.clone()
        else:
            data = torch.empty(header.size, dtype=torch.uint8)
            self._links.receive_into(header, [data.numpy()] if header.size else [])
        return Bucket(
            contents=[(n, dtype, tuple(shape), digest) for n, dtype, shape, digest in contents], data=data, total=total
        )


class Packer:
    """Copies tensors into buckets and sends the buckets.

    Memory is reused after arrival, because allocating fresh pages would take longer than the copies.

    Args:
        channels: The channels to send to.
        blocks: The memory.
    """

    def __init__(self, channels: Sequence[BucketChannel], blocks: BlockPool) -> None:
        self._channels, self._blocks = channels, blocks
        self._shared = any(channel.shares_memory for channel in channels)
        self._contents: list[tuple[str, str, tuple[int, ...], str]] = []
        self._block: Block | None = None
        self._size = 0
        self._patience_s = PATIENCE_S

    def add(self, name: str, tensor: Tensor, stream_digest: StreamDigest) -> None:
        """Copy a tensor, whose memory may then change, and count its copy.

        Raises:
            ConfigError: Its data type cannot be sent.
        """
        if tensor.dtype not in DTYPE_NAMES:
            raise ConfigError(f"{name} is {tensor.dtype}, which cannot be sent; it must be one of {', '.join(DTYPES)}")
        # The span of a tensor of this size after the bytes that the block already contains.
        (_, (begin, end)), _ = aligned([self._size, tensor.numel() * tensor.itemsize])
        if self._block is None or end > self._block.data.numel():
            self.flush()
            begin, end = 0, end - begin
            started = time.monotonic()
            self._block = self._blocks.take(
                max(end, BUCKET_BYTES), pinned=tensor.is_cuda, shared=self._shared, patience_s=self._patience_s
            )
            waited_s = time.monotonic() - started
            # Successive waits that end with a new block share one limit: a target that has stopped reading delays the
            # stream by PATIENCE_S in all, not once for each bucket. A block that was returned restores the limit.
            self._patience_s = self._patience_s - waited_s if self._block.is_new else PATIENCE_S
        copy = self._block.data[begin:end].view(tensor.dtype).view(tensor.shape)
        if tensor.is_cuda and not self._block.pinned:
            # Shared memory is not pinned, so the copy goes through pinned pieces.
            source = tensor.detach().contiguous().view(-1).view(torch.uint8)
            self._blocks.staging(tensor.device).copy(self._block.data[begin:end], source)
        else:
            copy.copy_(tensor.detach())
        # The digest is that of the copy, which is what travels.
        self._contents.append((name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), stream_digest.add(name, copy)))
        self._size = end

    def flush(self) -> None:
        """Send what has been added."""
        if self._block is None:
            return
        block, self._block = self._block, None
        bucket = Bucket(contents=self._contents, data=block.data[: self._size], block=block)
        block.in_flight = [sent for channel in self._channels if (sent := channel.send(bucket)) is not None]
        # Returned immediately: the pool does not hand it out before everything in flight has been read.
        self._blocks.give(block)
        self._contents, self._size = [], 0

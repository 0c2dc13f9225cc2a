"""Copies the parameters of one role to another in a separate pool with broadcasts, from device to device.

The source's first process and all processes of the target share a communicator, which is created once and reused. Metadata is sent ahead
over the connections between the pools, so that the host does not wait for the device: first the communicator, then the contents of each
bucket, and finally checksums over the bytes of all buckets. Both sides compute the checksums on their devices, and read them once.

    target: the id of its communicator  ->  source: the id of a new one if any differs  ->  both connect
    source: the contents of a bucket    ->  both: broadcast, sums on the device         ->  ...
    source: the sums of all buckets     ->  target: compares
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
import xxhash
from torch import Tensor

from ...engine import progress
from ...engine.errors import ConfigError, ModelError, RemoteError
from ..data_plane.buckets import Bucket
from ..data_plane.digests import device_sums
from ..data_plane.links import Header, Links
from ..data_plane.plan import aligned, pool_of
from ..data_plane.store import DTYPE_NAMES, DTYPES
from ..protocol import comm_id as comm_ids
from ..protocol.hooks import SyncParams
from .param_sync import load_stream, outgoing_weights
from .pool_communicator import Broadcast, PoolCommunicator
from .worker import ModelWorker

BUCKET_BYTES = 64 * 2**20
"""Size of a bucket, unless a single tensor is larger; three are on the source's device at a time, one on each target's."""
IN_FLIGHT = 2
"""The number of broadcasts in flight while the next bucket is filled."""
BROADCAST_SHARE = 0.9
"""The part of a group's timeout that a broadcast may take. A process that waits in one then reports it before those that wait for the
next message of that process."""

Contents = Sequence[tuple[str, str, tuple[int, ...], str]]


def broadcast_params(worker: ModelWorker, hook: SyncParams) -> dict[str, Any] | None:
    """Take part in a transfer of parameters to another pool. Collective over the processes of both roles.

    Returns:
        The receipt; see `sync_params`.

    Raises:
        ConfigError: The target cannot take the parameters.
        ModelError: The received data differs from the data that was sent.
        RemoteError: Another process failed.
    """
    links = worker.data.links
    if links is None:
        raise ConfigError("this worker has no connections to other pools; send listen and peers first")
    if pool_of(hook.sources[0]) == pool_of(hook.targets[0]):
        raise ConfigError(
            f"backend={hook.backend} for weights of {hook.source} to {hook.target}, whose processes are both in pool "
            f"{pool_of(hook.targets[0])!r}; leave it empty"
        )
    if worker.id not in hook.sources:
        sums = BucketSums()
        load_stream(worker, hook, _received(worker, links, hook, sums))
        return sums.receipt(hook.version)
    if worker.id == hook.sources[0]:
        return _send_all(worker, links, hook)
    # The other processes of the source only help to gather the tensors.
    with outgoing_weights(worker, hook, hook.dtype) as stream:
        for _ in stream:
            progress.advance()
    return None


class BucketSums:
    """The contents of a stream of buckets, and the sums over the bytes of each, which stay on the device."""

    def __init__(self) -> None:
        self.contents: list[Contents] = []
        self._sums: list[Tensor] = []
        self._values: list[list[int]] = []
        self.bytes = 0
        """The size of all tensors so far, without what lies between them."""

    def add(self, contents: Contents, data: Tensor) -> None:
        """Count a bucket, whose memory may then change."""
        self.contents.append(contents)
        self._sums.append(device_sums(data))
        self.bytes += sum(torch.Size(shape).numel() * DTYPES[dtype].itemsize for _, dtype, shape, _ in contents)

    def values(self) -> list[list[int]]:
        """Return the two sums of each bucket. The only time that the host waits for the device."""
        if len(self._values) < len(self._sums):
            self._values = torch.stack(self._sums).tolist()
        return self._values

    def check(self, expected: Sequence[Sequence[int]]) -> None:
        """Compare the sums with those of the source.

        Raises:
            ModelError: They differ.
        """
        if len(expected) != len(self.values()):
            raise ModelError(f"{len(self.values())} of {len(expected)} buckets of weights arrived; sync the weights again")
        for contents, here, there in zip(self.contents, self.values(), expected, strict=True):
            if list(here) != list(there):
                others = f" or one of the {len(contents) - 1} tensors after it" if len(contents) > 1 else ""
                raise ModelError(
                    f"{contents[0][0]}{others} arrived with different bytes than were sent; sync the weights again"
                )

    def receipt(self, version: int | None) -> dict[str, Any]:
        """Return the receipt of the transfer."""
        hasher = xxhash.xxh3_128()
        for contents, sums in zip(self.contents, self.values(), strict=True):
            hasher.update("".join(f"{name} {dtype} {list(shape)}\n" for name, dtype, shape, _ in contents).encode())
            hasher.update(f"{' '.join(map(str, sums))}\n".encode())
        tensors = sum(len(contents) for contents in self.contents)
        return {
            "version": version,
            "tensors": tensors,
            "bytes": self.bytes,
            "digest": hasher.hexdigest(),
            "sent_bytes": self.bytes,
        }


# ---- the source ---------------------------------------------------------------------------------------------------------


def _send_all(worker: ModelWorker, links: Links, hook: SyncParams) -> dict[str, Any]:
    """Send all weights, and always read their stream to its end, because the other processes of the source take part in it."""
    with ExitStack() as stack:
        stream: Iterator[tuple[str, Tensor]] = iter(())
        try:
            stream = stack.enter_context(outgoing_weights(worker, hook, hook.dtype))
            sender = BucketSender(_agreed_as_source(worker, links, hook), links, hook)
            for name, tensor in stream:
                progress.advance()
                sender.add(name, tensor)
            sender.finish()
            return sender.sums.receipt(hook.version)
        except Exception as e:
            # Targets that wait for a header get the reason over the links, and those that wait in a broadcast from the
            # communicator.
            reason = str(e) if isinstance(e, RemoteError) else f"{worker.id} failed: {type(e).__name__}: {e}"
            for target in hook.targets:
                links.send(target, hook.title, [], error=reason)
            _discard(worker, hook, reason)
            # The first error is the one to report.
            with suppress(Exception):
                for _ in stream:
                    progress.advance()
            raise


class BucketSender:
    """Copies tensors into buckets on the device and broadcasts these.

    Args:
        communicator: The communicator, whose rank 0 this process is.
        links: The connections to the targets.
        hook: The transfer.
    """

    def __init__(self, communicator: PoolCommunicator, links: Links, hook: SyncParams) -> None:
        self._communicator, self._links, self._hook = communicator, links, hook
        self._contents: list[tuple[str, str, tuple[int, ...], str]] = []
        self._data: Tensor | None = None
        self._size = 0
        self._in_flight: deque[Broadcast] = deque()
        self.sums = BucketSums()
        """The contents and checksums of the sent buckets."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor, whose memory may then change.

        Raises:
            ConfigError: Its data type cannot be sent.
        """
        if tensor.dtype not in DTYPE_NAMES:
            raise ConfigError(f"{name} is {tensor.dtype}, which cannot be sent; it must be one of {', '.join(DTYPES)}")
        (_, (begin, end)), _ = aligned([self._size, tensor.numel() * tensor.itemsize])
        if self._data is None or end > self._data.numel():
            self._flush()
            begin, end = 0, end - begin
            # Zeros, so that equal weights have equal sums: those are over what lies between the tensors too.
            self._data = torch.zeros(max(end, BUCKET_BYTES), dtype=torch.uint8, device=self._communicator.device)
        self._data[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self._contents.append((name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), ""))
        self._size = end

    def finish(self) -> None:
        """Send the rest, wait until all broadcasts are complete, and send the checksums."""
        self._flush()
        while self._in_flight:
            self._communicator.wait(self._in_flight.popleft())
        self._tell(["end", self.sums.values()])

    def _flush(self) -> None:
        if self._data is None:
            return
        while len(self._in_flight) >= IN_FLIGHT:
            self._communicator.wait(self._in_flight.popleft())
        data = self._data[: self._size]
        self.sums.add(self._contents, data)
        # Sent before the broadcast begins: a target allocates the memory for it after reading this.
        self._tell(["bucket", self._contents])
        if self._size:
            self._in_flight.append(self._communicator.broadcast(data))
        self._data, self._contents, self._size = None, [], 0

    def _tell(self, about: Any) -> None:
        for target in self._hook.targets:
            self._links.send(target, self._hook.title, [], about=about)


def _agreed_as_source(worker: ModelWorker, links: Links, hook: SyncParams) -> PoolCommunicator:
    """Return the communicator of a transfer, a new one unless all targets are in the present one.

    Raises:
        RemoteError: A target does not take part.
    """
    # Every target reports the communicator that it has. One that was restarted has none, and then all of them need a
    # new one.
    headers = {target: links.receive_header(target, hook.title) for target in hook.targets}
    for target, header in headers.items():
        if header.error:
            raise RemoteError(f"{target} does not take the weights of {hook.source}: {header.error}")
    present = worker.communicators.get(_members(hook))
    if present is not None and all(header.about == present.id for header in headers.values()):
        meeting, listener = "", None
    else:
        _discard(worker, hook)
        present = None
        comm_id, listener = comm_ids.mint(_host_of(links.address))
        meeting = comm_id.hex()
    for target in hook.targets:
        links.send(target, hook.title, [], about=["meet", meeting])
    return present or _connect(worker, hook, meeting, 0, listener)


# ---- the target ---------------------------------------------------------------------------------------------------------


def _received(worker: ModelWorker, links: Links, hook: SyncParams, sums: BucketSums) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of buckets as they arrive; they stay as they are.

    Raises:
        ModelError: The received data differs from the data that was sent. The stream has then been read to its end.
        RemoteError: Another process failed.
    """
    root = hook.sources[0]
    try:
        # First agree on a communicator with the source and the other targets, then receive the buckets in it.
        present = worker.communicators.get(_members(hook))
        links.send(root, hook.title, [], about="" if present is None else present.id)
        _, meeting = _next_header(links, hook).about
        if meeting:
            _discard(worker, hook)
            present = _connect(worker, hook, meeting, 1 + hook.targets.index(worker.id))
        assert present is not None
        while True:
            kind, value = _next_header(links, hook).about
            if kind == "end":
                break
            bucket = _receive(present, value)
            sums.add(bucket.contents, bucket.data)
            for name, tensor, _ in bucket.tensors():
                progress.advance()
                yield name, tensor
    except Exception as e:
        _discard(worker, hook, f"{worker.id}: {type(e).__name__}: {e}")
        raise
    sums.check(value)


def _receive(communicator: PoolCommunicator, value: Sequence[Any]) -> Bucket:
    contents = [(name, dtype, tuple(shape), digest) for name, dtype, shape, digest in value]
    _, size = aligned(torch.Size(shape).numel() * DTYPES[dtype].itemsize for _, dtype, shape, _ in contents)
    data = torch.empty(size, dtype=torch.uint8, device=communicator.device)
    if size:
        communicator.wait(communicator.broadcast(data))
    return Bucket(contents=contents, data=data)


def _next_header(links: Links, hook: SyncParams) -> Header:
    header = links.receive_header(hook.sources[0], hook.title)
    if header.error:
        raise RemoteError(header.error)
    return header


# ---- both ---------------------------------------------------------------------------------------------------------------


def _members(hook: SyncParams) -> tuple[str, ...]:
    return (hook.backend, hook.sources[0], *hook.targets)


def _connect(worker: ModelWorker, hook: SyncParams, meeting: str, rank: int, listener: Any = None) -> PoolCommunicator:
    """Return a new communicator, which the next transfers reuse."""
    communicator = worker.communicators[_members(hook)] = PoolCommunicator(
        comm_ids.parse(meeting),
        rank,
        1 + len(hook.targets),
        hook.backend,
        title=f"weights of {hook.source} to {hook.target} over {hook.backend}",
        wait_s=worker.settings.init_s,
        timeout_s=BROADCAST_SHARE * worker.settings.timeout_s,
        listener=listener,
    )
    return communicator


def _discard(worker: ModelWorker, hook: SyncParams, reason: str = "") -> None:
    """End the communicator of a transfer, if there is one; the next transfer makes another."""
    present = worker.communicators.pop(_members(hook), None)
    if present is not None:
        present.end(reason)


def _host_of(address: str) -> str:
    """Return the host at which other workers reach this one, of the address where it listens for them."""
    return "127.0.0.1" if address.startswith("ipc://") else address.removeprefix("tcp://").rpartition(":")[0].strip("[]")

"""Copies the parameters of one role to another, of any layout and engine, in this pool or in another one.

The source streams full tensors under Hugging Face names on all of its processes. A process that has both roles hands them on by
itself. The others get them from the source's first process in buckets: within the pool by a broadcast, and in another pool by a
connection to the target's first process, which broadcasts them there. A digest of each tensor travels with it, and one of all of them at
the end; a target that received anything else refuses it.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine import progress
from ...engine.errors import ConfigError, ModelError, RemoteError
from ...engine.parallel.process_groups import EngineGroups
from ..data_plane.links import Links
from ..data_plane.plan import ITEM_SIZES, aligned, pool_of, rank_of
from ..data_plane.store import DTYPE_NAMES, DTYPES
from .digests import Tally
from .hooks import SyncParams

if TYPE_CHECKING:
    from .worker import ModelWorker

BUCKET_BYTES = 4 * 2**20
"""Size of the tensors that travel together. Memory of this size is used again; larger pieces would be fresh pages every time."""

Pairs = Iterator[tuple[str, Tensor]]
Contents = list[tuple[str, str, tuple[int, ...], str]]
"""Name, data type, shape and digest of the tensors of a bucket."""


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """Tensors that travel together, or the end of the stream.

    Args:
        contents: What they are; nothing at the end.
        total: At the end, the digest of all tensors.
        error: At the end, why the source failed.
    """

    contents: Contents = field(default_factory=list)
    total: str = ""
    error: str = ""


class _Channel(Protocol):
    """One way from the source's first process to others."""

    def send(self, bucket: _Bucket, pieces: Sequence[Tensor]) -> None:
        """Send a bucket with the bytes of its tensors."""
        ...

    def receive(self) -> tuple[_Bucket, list[Tensor]]:
        """Return the next bucket, with the bytes of its tensors.

        Raises:
            RemoteError: The source failed.
        """
        ...


class _Broadcast:
    """Within a pool.

    Args:
        groups: The groups of this transfer.
        source: The rank that sends.
        targets: The ranks that receive.
    """

    def __init__(self, groups: EngineGroups, source: int, targets: Sequence[int]) -> None:
        self._source = source
        self._group = groups.get([source, *targets], "gloo")

    def send(self, bucket: _Bucket, pieces: Sequence[Tensor]) -> None:
        dist.broadcast_object_list([bucket], src=self._source, group=self._group)
        data, places = _room_for(bucket)
        for piece, place in zip(pieces, places, strict=True):
            place.copy_(piece)
        if data.numel():
            dist.broadcast(data, src=self._source, group=self._group)

    def receive(self) -> tuple[_Bucket, list[Tensor]]:
        header: list[Any] = [None]
        dist.broadcast_object_list(header, src=self._source, group=self._group)
        bucket = header[0]
        if bucket.error:
            raise RemoteError(bucket.error)
        data, places = _room_for(bucket)
        if data.numel():
            dist.broadcast(data, src=self._source, group=self._group)
        return bucket, places


class _Link:
    """Between pools."""

    def __init__(self, links: Links, source: str, target: str, title: str) -> None:
        self._links, self._source, self._target, self._title = links, source, target, title

    def send(self, bucket: _Bucket, pieces: Sequence[Tensor]) -> None:
        about = [bucket.contents, bucket.total]
        views = [piece.numpy() for piece in pieces if piece.numel()]
        self._links.send(self._target, self._title, views, about=about, error=bucket.error)

    def receive(self) -> tuple[_Bucket, list[Tensor]]:
        header = self._links.receive_header(self._source, self._title)
        if header.error:
            raise RemoteError(header.error)
        contents, total = header.about
        bucket = _Bucket(contents=[(n, dtype, tuple(shape), digest) for n, dtype, shape, digest in contents], total=total)
        _, places = _room_for(bucket)
        self._links.receive_into(header, [place.numpy() for place in places if place.numel()])
        return bucket, places


def sync_params(worker: "ModelWorker", hook: SyncParams) -> dict[str, Any] | None:
    """Take part in a transfer of parameters. Collective over the processes of both roles.

    Returns:
        The receipt: the number of `tensors` that this process has sent or loaded, their `bytes`, their `digest`, and the `version` that
        they have. None from a process that has only helped the source's first one to gather them.

    Raises:
        ConfigError: The target cannot take the parameters; it must not be used until it has loaded a complete set.
        ModelError: What arrived is not what was sent.
        RemoteError: The source failed.
    """
    is_source, is_target = worker.place in hook.sources, worker.place in hook.targets
    # One kind of digest in a transfer: what travels is in host memory.
    tally = Tally(in_host=not set(hook.targets) <= set(hook.sources))
    groups = EngineGroups(None)
    try:
        outgoing, incoming = _channels(worker, hook, groups)
        if not is_source:
            assert incoming is not None
            _load(worker, hook, _received(incoming, outgoing, tally))
        else:
            with worker.host.weights(hook.source) as stream:
                if not is_target and not outgoing:
                    for _ in stream:
                        progress.advance()
                    return None
                pairs = _sent(stream, outgoing, tally)
                if is_target:
                    _load(worker, hook, pairs)
                else:
                    for _ in pairs:
                        pass
    finally:
        groups.close()
    return {"version": hook.version, "tensors": len(tally), "bytes": tally.bytes, "digest": tally.digest()}


def _channels(worker: "ModelWorker", hook: SyncParams, groups: EngineGroups) -> tuple[list[_Channel], _Channel | None]:
    """Return where this process sends to, and from where it receives."""
    name, root = worker.place, hook.sources[0]
    remote = [target for target in hook.targets if target not in hook.sources]
    outgoing: list[_Channel] = []
    incoming: _Channel | None = None
    if not remote:
        return outgoing, incoming
    first, same_pool = remote[0], pool_of(remote[0]) == pool_of(root)
    relay = root if same_pool else first
    below = [target for target in remote if target != relay]
    if not same_pool and name in (root, first):
        links = worker.data.links
        if links is None:
            raise ConfigError("this worker has no connections to other pools; send listen and peers first")
        link = _Link(links, root, first, hook.title)
        if name == root:
            outgoing.append(link)
        else:
            incoming = link
    if below and name in (relay, *below):
        broadcast = _Broadcast(groups, rank_of(relay), [rank_of(target) for target in below])
        if name == relay:
            outgoing.append(broadcast)
        else:
            incoming = broadcast
    return outgoing, incoming


def remote_target(hook: SyncParams) -> str | None:
    """Return the process of another pool that the source's first process sends to; None if there is none."""
    remote = [target for target in hook.targets if target not in hook.sources]
    return remote[0] if remote and pool_of(remote[0]) != pool_of(hook.sources[0]) else None


def _load(worker: "ModelWorker", hook: SyncParams, pairs: Pairs) -> None:
    """Load a stream into the target, and read it to its end whatever happens: others take part in it."""
    try:
        worker.host.load_weights(hook.target, pairs, hook.eta, hook.version)
        left = sum(1 for _ in pairs)
    except BaseException:
        # Its own error counts, and the source's is the source's.
        with suppress(Exception):
            for _ in pairs:
                pass
        raise
    if left:
        raise ConfigError(
            f"load_weights of {hook.target!r} returned before it had read all weights ({left} tensors were left); read the stream "
            "to its end"
        )


def _sent(stream: Pairs, channels: Sequence[_Channel], tally: Tally) -> Pairs:
    """Yield a stream, count it, and send it on in buckets."""
    pending: list[tuple[str, Tensor, str]] = []
    size = 0
    try:
        for name, tensor in stream:
            progress.advance()
            if not channels:
                tally.add(name, tensor)
            else:
                # The stream may reuse this tensor's memory for the next one.
                copy = tensor.detach().to("cpu", copy=True)
                pending.append((name, copy, tally.add(name, copy)))
                if tensor.dtype not in DTYPE_NAMES:
                    raise ConfigError(f"{name} is {tensor.dtype}, which cannot be sent; it must be one of {', '.join(DTYPES)}")
                size += tensor.numel() * tensor.itemsize
                if size >= BUCKET_BYTES:
                    _send_bucket(pending, channels)
                    pending, size = [], 0
            yield name, tensor
        if pending:
            _send_bucket(pending, channels)
    except Exception as e:
        for channel in channels:
            channel.send(_Bucket(error=f"{type(e).__name__}: {e}"), [])
        raise
    for channel in channels:
        channel.send(_Bucket(total=tally.digest()), [])


def _send_bucket(pairs: Sequence[tuple[str, Tensor, str]], channels: Sequence[_Channel]) -> None:
    contents: Contents = [(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), digest) for name, tensor, digest in pairs]
    pieces = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor, _ in pairs]
    for channel in channels:
        channel.send(_Bucket(contents=contents), pieces)


def _room_for(bucket: _Bucket) -> tuple[Tensor, list[Tensor]]:
    """Return memory for the bytes of a bucket, and the part of each tensor, aligned for any type."""
    places, size = aligned(torch.Size(shape).numel() * ITEM_SIZES[dtype] for _, dtype, shape, _ in bucket.contents)
    data = torch.empty(size, dtype=torch.uint8)
    return data, [data[begin:end] for begin, end in places]


def _received(incoming: _Channel, outgoing: Sequence[_Channel], tally: Tally) -> Pairs:
    """Yield the tensors of buckets as they arrive, after comparing their digests, and send the buckets on.

    Raises:
        ModelError: A tensor is not the one that was sent, or some are missing. The stream has then been read to its end.
        RemoteError: The source failed.
    """
    wrong = ""
    try:
        while True:
            bucket, pieces = incoming.receive()
            for channel in outgoing:
                channel.send(bucket, pieces)
            if not bucket.contents:
                break
            for (name, dtype, shape, digest), piece in zip(bucket.contents, pieces, strict=True):
                progress.advance()
                tensor = piece.view(DTYPES[dtype]).view(shape)
                if tally.add(name, tensor) != digest and not wrong:
                    wrong = f"{name} arrived with other bytes than it was sent with"
                if not wrong:
                    yield name, tensor
    except RemoteError as e:
        for channel in outgoing:
            channel.send(_Bucket(error=str(e)), [])
        raise
    if not wrong and tally.digest() != bucket.total:
        wrong = f"the {len(tally)} tensors that arrived are not those that were sent"
    if wrong:
        raise ModelError(f"{wrong}; sync the weights again")

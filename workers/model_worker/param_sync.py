"""Copies the parameters of one role to another, of any layout and engine, in this pool or in another one.

The source streams full tensors under Hugging Face names on all of its processes. A process that has both roles hands them on by
itself. The others get them from the source's first process in buckets: within the pool by a broadcast, and in another pool by a
connection to the target's first process, which broadcasts them there.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine import progress
from ...engine.errors import ConfigError, RemoteError
from ...engine.parallel.process_groups import EngineGroups
from ..data_plane.links import Links
from ..data_plane.plan import ITEM_SIZES, aligned, pool_of, rank_of
from ..data_plane.store import DTYPE_NAMES, DTYPES
from .hooks import SyncParams

if TYPE_CHECKING:
    from .worker import ModelWorker

BUCKET_BYTES = 64 * 2**20
"""Size of the tensors that travel together."""

Pairs = Iterator[tuple[str, Tensor]]
Contents = list[tuple[str, str, tuple[int, ...]]]
"""Name, data type and shape of the tensors of a bucket."""


class _Channel(Protocol):
    """One way from the source's first process to others."""

    def send(self, contents: Contents, data: Tensor, error: str) -> None:
        """Send a bucket; one without contents is the last."""
        ...

    def receive(self) -> tuple[Contents, Tensor]:
        """Return the next bucket.

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

    def send(self, contents: Contents, data: Tensor, error: str) -> None:
        dist.broadcast_object_list([(contents, data.numel(), error)], src=self._source, group=self._group)
        if data.numel():
            dist.broadcast(data, src=self._source, group=self._group)

    def receive(self) -> tuple[Contents, Tensor]:
        header: list[Any] = [None]
        dist.broadcast_object_list(header, src=self._source, group=self._group)
        contents, size, error = header[0]
        if error:
            raise RemoteError(error)
        data = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.broadcast(data, src=self._source, group=self._group)
        return contents, data


class _Link:
    """Between pools."""

    def __init__(self, links: Links, source: str, target: str, title: str) -> None:
        self._links, self._source, self._target, self._title = links, source, target, title

    def send(self, contents: Contents, data: Tensor, error: str) -> None:
        self._links.send(self._target, self._title, [data.numpy()], about=contents, error=error)

    def receive(self) -> tuple[Contents, Tensor]:
        header = self._links.receive_header(self._source, self._title)
        if header.error:
            raise RemoteError(header.error)
        data = torch.empty(header.size, dtype=torch.uint8)
        self._links.receive_into(header, [data.numpy()])
        return [(name, dtype, tuple(shape)) for name, dtype, shape in header.about], data


def sync_params(worker: "ModelWorker", hook: SyncParams) -> None:
    """Take part in a transfer of parameters. Collective over the processes of both roles.

    Raises:
        ConfigError: The target cannot take the parameters; it must not be used until it has loaded a complete set.
        RemoteError: The source failed.
    """
    groups = EngineGroups(None)
    try:
        is_source, is_target = worker.place in hook.sources, worker.place in hook.targets
        outgoing, incoming = _channels(worker, hook, groups)
        if not is_source:
            assert incoming is not None
            _load(worker, hook, _received(incoming, outgoing))
            return
        with worker.host.weights(hook.source) as stream:
            pairs = _sent(stream, outgoing)
            if is_target:
                _load(worker, hook, pairs)
            else:
                for _ in pairs:
                    pass
    finally:
        groups.close()


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
        worker.host.load_weights(hook.target, pairs, hook.eta)
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


def _sent(stream: Pairs, channels: Sequence[_Channel]) -> Pairs:
    """Yield a stream, and send it on in buckets."""
    pending: list[tuple[str, Tensor]] = []
    size = 0
    try:
        for name, tensor in stream:
            progress.advance()
            if channels:
                # The stream may reuse this tensor's memory for the next one.
                pending.append((name, tensor.detach().to("cpu", copy=True)))
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
            channel.send([], torch.empty(0, dtype=torch.uint8), f"{type(e).__name__}: {e}")
        raise
    for channel in channels:
        channel.send([], torch.empty(0, dtype=torch.uint8), "")


def _send_bucket(pairs: Sequence[tuple[str, Tensor]], channels: Sequence[_Channel]) -> None:
    contents: Contents = [(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in pairs]
    places, size = _layout(contents)
    data = torch.empty(size, dtype=torch.uint8)
    for (_, tensor), (begin, end) in zip(pairs, places, strict=True):
        data[begin:end] = tensor.contiguous().view(-1).view(torch.uint8)
    for channel in channels:
        channel.send(contents, data, "")


def _layout(contents: Contents) -> tuple[list[tuple[int, int]], int]:
    return aligned(torch.Size(shape).numel() * ITEM_SIZES[dtype] for _, dtype, shape in contents)


def _received(incoming: _Channel, outgoing: Sequence[_Channel]) -> Pairs:
    """Yield the tensors of buckets as they arrive, and send these on."""
    try:
        while True:
            contents, data = incoming.receive()
            for channel in outgoing:
                channel.send(contents, data, "")
            if not contents:
                return
            for (name, dtype, shape), (begin, end) in zip(contents, _layout(contents)[0], strict=True):
                progress.advance()
                yield name, data[begin:end].view(DTYPES[dtype]).view(shape)
    except RemoteError as e:
        for channel in outgoing:
            channel.send([], torch.empty(0, dtype=torch.uint8), str(e))
        raise

"""Copies the parameters of one role to another, of any layout and engine, in this pool or in another one.

The source streams full tensors under Hugging Face names on all of its processes. A process that has both roles passes them on locally. The
others receive them from the source's first process in buckets: within the pool by a broadcast, and in another pool over a connection to
the target's first process, which broadcasts them there. `param_broadcast` implements transfers between GPUs. If all weights of the target
have the same data type, the source rounds to it: the target would round in the same way, and fewer bytes are sent. Each tensor is sent
with its digest, and the stream ends with a digest of all tensors; a target that received anything else refuses it. Transfers to another
pool may send only the changes; see `data_plane.changes`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from ...engine import progress
from ...engine.errors import ConfigError, ModelError, RemoteError
from ...engine.parallel.process_groups import EngineGroups
from ..data_plane.blocks import BlockPool
from ..data_plane.buckets import BroadcastChannel, Bucket, BucketChannel, LinkChannel, Packer
from ..data_plane.changes import SentTensors
from ..data_plane.digests import StreamDigest
from ..data_plane.kept_versions import KeptVersions
from ..data_plane.plan import pool_of, rank_of
from ..data_plane.store import DTYPES
from ..protocol.hooks import SyncParams
from .worker import ModelWorker

SETTLE_S = 1.0
"""How long to wait for blocks still being read after a transfer, in seconds. Otherwise their memory is held until the next transfer."""

NamedTensors = Iterator[tuple[str, Tensor]]


def sync_params(worker: ModelWorker, hook: SyncParams) -> dict[str, Any] | None:
    """Take part in a transfer of parameters. Collective over the processes of both roles.

    Returns:
        The receipt: the number of `tensors` that this process has sent or loaded, their `bytes`, `digest` and `version`. None for a
        process that has only helped the source's first process to gather them.

    Raises:
        ConfigError: The target cannot take the parameters; it must not be used until it has loaded a complete set.
        ModelError: The received data differs from the data that was sent.
        RemoteError: The source failed.
    """
    is_source, is_target = worker.id in hook.sources, worker.id in hook.targets
    if (
        hook.base is not None
        and not {*hook.sources} & {*hook.targets}
        and pool_of(hook.sources[0]) != pool_of(hook.targets[0])
    ):
        return _sync_changes(worker, hook, hook.base)
    # A transfer uses one kind of digest, because the sent data is in host memory.
    stream_digest = StreamDigest(in_host=not set(hook.targets) <= set(hook.sources))
    # It also uses one kind of values, even in processes that pass weights on locally.
    dtype = "" if set(hook.targets) <= set(hook.sources) else hook.dtype
    groups = EngineGroups(None)
    try:
        outgoing, incoming = _channels(worker, hook, groups)
        if not is_source:
            assert incoming is not None
            load_stream(worker, hook, _received(incoming, outgoing, stream_digest))
        else:
            with outgoing_weights(worker, hook, dtype) as stream:
                if not is_target and not outgoing:
                    for _ in stream:
                        progress.advance()
                    return None
                pairs = _sent(stream, outgoing, stream_digest, worker.data.blocks)
                if is_target:
                    load_stream(worker, hook, pairs)
                else:
                    for _ in pairs:
                        pass
        # Blocks that the targets have read are free; data that they keep is their own copy.
        worker.data.blocks.trim(SETTLE_S)
    finally:
        groups.close()
    return _receipt(hook, stream_digest, stream_digest.bytes)


def _receipt(hook: SyncParams, tensors: StreamDigest, sent_bytes: int) -> dict[str, Any]:
    return {
        "version": hook.version,
        "tensors": len(tensors),
        "bytes": tensors.bytes,
        "digest": tensors.digest(),
        "sent_bytes": sent_bytes,
    }


def _sync_changes(worker: ModelWorker, hook: SyncParams, base: str) -> dict[str, Any] | None:
    """Take part in a transfer to another pool that sends only changes since the last one; see `sync_params`.

    Args:
        worker: The worker.
        hook: The transfer.
        base: The digest of the tensors that it starts from; empty if all are sent.
    """
    key = _key(hook)
    pieces, results = StreamDigest(in_host=True), StreamDigest(in_host=True)
    groups = EngineGroups(None)
    try:
        outgoing, incoming = _channels(worker, hook, groups)
        if incoming is None and not outgoing:
            # A process that only helps the source's first process to gather the tensors.
            with outgoing_weights(worker, hook, hook.dtype) as stream:
                for _ in stream:
                    progress.advance()
            return None
        # Stored again only if the transfer succeeds.
        sent = worker.sent_tensors.pop(key, None) or SentTensors()
        if incoming is not None:
            received = _received(incoming, outgoing, pieces, lambda: results.digest())
            load_stream(worker, hook, _applied(sent, base, received, results))
        else:
            with outgoing_weights(worker, hook, hook.dtype) as stream:
                changed = _encoded(sent, base, stream, results, stays=hook.keep > 0)
                for _ in _sent(changed, outgoing, pieces, worker.data.blocks, lambda: results.digest()):
                    pass
        worker.data.blocks.trim(SETTLE_S)
    finally:
        groups.close()
    sent.digest = results.digest()
    worker.sent_tensors[key] = sent
    return _receipt(hook, results, pieces.bytes)


def _encoded(sent: SentTensors, base: str, stream: NamedTensors, results: StreamDigest, *, stays: bool) -> NamedTensors:
    sent.check(base)
    for name, tensor in stream:
        yield from sent.pieces(name, tensor, results, stays=stays)


def _applied(sent: SentTensors, base: str, received: NamedTensors, results: StreamDigest) -> NamedTensors:
    try:
        sent.check(base)
        yield from sent.tensors(received, results)
    except ModelError:
        # The others take part in the transfer, so its stream must be read to the end.
        with suppress(Exception):
            for _ in received:
                pass
        raise


def _key(hook: SyncParams) -> str:
    return f"{hook.source} to {hook.target}"


@contextmanager
def outgoing_weights(worker: ModelWorker, hook: SyncParams, dtype: str) -> Iterator[NamedTensors]:
    """Yield the weights that a process of the source sends or helps to gather: those of the role, or a kept version.

    Args:
        worker: The worker.
        hook: The transfer.
        dtype: See `rounded`.

    Raises:
        ModelError: The version is not kept.
    """
    # Removed first, so that a transfer that keeps nothing frees earlier versions.
    kept = worker.kept_versions.pop(_key(hook), None) or KeptVersions()
    if hook.keep or hook.resend:
        worker.kept_versions[_key(hook)] = kept
    if hook.resend:
        yield kept.tensors(hook.version)
        return
    with worker.host.weights(hook.source, adapters=hook.adapters) as stream:
        pairs = rounded(stream, dtype)
        if hook.keep and hook.version is not None and worker.id == hook.sources[0] and remote_target(hook) is not None:
            pairs = kept.keeping(hook.version, hook.keep, pairs)
        yield pairs


def _channels(worker: ModelWorker, hook: SyncParams, groups: EngineGroups) -> tuple[list[BucketChannel], BucketChannel | None]:
    """Return the channels that this process sends to, and the one that it receives from."""
    name, root = worker.id, hook.sources[0]
    remote = [target for target in hook.targets if target not in hook.sources]
    outgoing: list[BucketChannel] = []
    incoming: BucketChannel | None = None
    if not remote:
        return outgoing, incoming
    # In the pool of the source, its first process broadcasts. Another pool is sent the stream once, and its first
    # target broadcasts there.
    first, same_pool = remote[0], pool_of(remote[0]) == pool_of(root)
    relay = root if same_pool else first
    below = [target for target in remote if target != relay]
    if not same_pool and name in (root, first):
        links = worker.data.links
        if links is None:
            raise ConfigError("this worker has no connections to other pools; send listen and peers first")
        link = LinkChannel(links, worker.data.reader, root, first, hook.title)
        if name == root:
            outgoing.append(link)
        else:
            incoming = link
    if below and name in (relay, *below):
        broadcast = BroadcastChannel(groups, rank_of(relay), [rank_of(target) for target in below])
        if name == relay:
            outgoing.append(broadcast)
        else:
            incoming = broadcast
    return outgoing, incoming


def remote_target(hook: SyncParams) -> str | None:
    """Return the process of another pool that the source's first process sends to; None if there is none."""
    remote = [target for target in hook.targets if target not in hook.sources]
    return remote[0] if remote and pool_of(remote[0]) != pool_of(hook.sources[0]) else None


def load_stream(worker: ModelWorker, hook: SyncParams, pairs: NamedTensors) -> None:
    """Load a stream into the target, and always read it to its end, because others take part in it."""
    try:
        if hook.adapters:
            worker.host.load_adapters(hook.target, pairs, hook.version)
        else:
            worker.host.load_weights(hook.target, pairs, hook.eta, hook.version)
        left = sum(1 for _ in pairs)
    except BaseException:
        # The target's own error is raised here; an error of the source is reported by the source.
        with suppress(Exception):
            for _ in pairs:
                pass
        raise
    if left:
        raise ConfigError(
            f"load_weights of {hook.target!r} returned before it had read all weights ({left} tensors were left); read the stream "
            "to its end"
        )


def rounded(stream: NamedTensors, dtype: str) -> NamedTensors:
    """Yield a stream with wider floating-point tensors converted to a data type; unchanged if it is empty."""
    to = DTYPES[dtype] if dtype else None
    for name, tensor in stream:
        narrows = to is not None and tensor.is_floating_point() and tensor.itemsize > to.itemsize
        yield name, tensor.detach().to(to) if narrows else tensor


def _sent(
    stream: NamedTensors,
    channels: Sequence[BucketChannel],
    stream_digest: StreamDigest,
    blocks: BlockPool,
    more: Callable[[], str] = str,
) -> NamedTensors:
    """Yield a stream, count it, and send it on in buckets, with its digest at the end and perhaps one `more`."""
    packer = Packer(channels, blocks)
    try:
        for name, tensor in stream:
            progress.advance()
            if channels:
                packer.add(name, tensor, stream_digest)
            else:
                stream_digest.add(name, tensor)
            yield name, tensor
        packer.flush()
    except Exception as e:
        for channel in channels:
            # The receivers wait for a bucket; they get the error in its place.
            channel.send(Bucket(error=f"{type(e).__name__}: {e}"))
        raise
    for channel in channels:
        channel.send(Bucket(total=stream_digest.digest() + more()))


def _received(
    incoming: BucketChannel, outgoing: Sequence[BucketChannel], stream_digest: StreamDigest, more: Callable[[], str] = str
) -> NamedTensors:
    """Yield the tensors of buckets as they arrive, after comparing their digests, and send the buckets on.

    Raises:
        ModelError: A tensor differs from the one that was sent, or some are missing. The stream has then been read to its end.
        RemoteError: The source failed.
    """
    wrong = ""
    try:
        while True:
            bucket = incoming.receive()
            for channel in outgoing:
                # Before the tensors are loaded here, so that the other targets receive them in the meantime.
                channel.send(bucket)
            if not bucket.contents:
                break
            for name, tensor, digest in bucket.tensors():
                progress.advance()
                # After a difference nothing more is loaded, but the stream is read to its end, because the sender and
                # other targets take part.
                if stream_digest.add(name, tensor) != digest and not wrong:
                    wrong = f"{name} arrived with different bytes than were sent"
                if not wrong:
                    yield name, tensor
    except Exception as e:
        for channel in outgoing:
            channel.send(Bucket(error=str(e) if isinstance(e, RemoteError) else f"{type(e).__name__}: {e}"))
        raise
    if not wrong and stream_digest.digest() + more() != bucket.total:
        wrong = f"the {len(stream_digest)} tensors that arrived are not those that were sent"
    if wrong:
        raise ModelError(f"{wrong}; sync the weights again")

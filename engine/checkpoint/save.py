"""Saving an engine's state to a checkpoint folder: first a snapshot, then the write. Independent of the backend."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import CheckpointError, disk_error
from ..parallel.collectives import all_gather_object, call_on_first, collective_errors
from ..parallel.topology import Topology
from ..pinned import empty_together
from .local_shards import DTYPES, LocalShard, host_bytes
from .machine import describe_machine
from .manifest import FORMAT, MODEL, merge_index, write_manifest
from .retention import folder_name
from .rng import rng_state
from .safetensors_io import TensorWriter, digests_of
from .storage import TEMPORARY, Store


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """One rank's part of a checkpoint, before it is written.

    Args:
        step: The checkpoint's step.
        local_shards: The local shards that this rank writes.
        rng: This rank's random state.
        state: The other fields of the manifest, JSON-serializable and the same on every rank.
        model_files: A function that returns the config and tokenizer files by name; called on rank 0 only.
    """

    step: int
    local_shards: tuple[LocalShard, ...]
    rng: Mapping[str, Any]
    state: Mapping[str, Any]
    model_files: Callable[[], Mapping[str, bytes]]


class HostCopies:
    """Host buffers for copies of tensors, reused by every save, because memory pages that have been touched are fast."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, local_shards: Iterable[LocalShard]) -> None:
        """Allocate and touch all buffers that `take` will need, so that the first copy is as fast as the others."""
        owned = {key_of(shard): shard.data for shard in local_shards if shard.owned and shard.data.numel()}
        self._buffers = self._buffers_of(owned)
        for buffer in self._buffers.values():
            buffer.zero_()

    def _buffers_of(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a buffer for each tensor, reusing those of the last save if they fit."""
        buffers = {
            key: buffer
            for key, tensor in data.items()
            if (buffer := self._buffers.get(key)) is not None and (buffer.dtype, buffer.shape) == (tensor.dtype, tensor.shape)
        }
        # Pinned memory only for tensors of a GPU, which copies to it without waiting.
        for pinned in (False, True):
            missing = [key for key, tensor in data.items() if key not in buffers and tensor.is_cuda == pinned]
            new = empty_together([data[key] for key in missing], pinned=pinned)
            buffers |= dict(zip(missing, new, strict=True))
        return buffers

    def take(self, local_shards: Iterable[LocalShard]) -> tuple[LocalShard, ...]:
        """Return the owned shards with copies of their data; the copies are complete on return."""
        shards = {key_of(shard): shard for shard in local_shards}
        self._buffers = self._buffers_of({key: shard.data for key, shard in shards.items()})
        copies = []
        for key, shard in shards.items():
            buffer = self._buffers[key].copy_(shard.data.detach(), non_blocking=True)
            copies.append(LocalShard(kind=shard.kind, name=shard.name, shape=shard.shape, offset=shard.offset, data=buffer))
        # One wait for all copies instead of one for each.
        if any(shard.data.is_cuda for shard in shards.values()):
            torch.cuda.synchronize()
        return tuple(copies)


def take_snapshot(
    step: int,
    local_shards: Iterable[LocalShard],
    state: Mapping[str, Any],
    model_files: Callable[[], Mapping[str, bytes]],
    copies: HostCopies | None = None,
) -> Snapshot:
    """Take a snapshot of this rank's part of a checkpoint.

    Args:
        step: The checkpoint's step.
        local_shards: This rank's local shards; it writes those that it owns.
        state: The other fields of the manifest.
        model_files: A function that returns the config and tokenizer files by name.
        copies: The buffers to copy the tensors into, so that training can continue while they are written; None does not copy
            them.
    """
    if step < 0:
        raise CheckpointError(f"step={step}; the step of a checkpoint must be 0 or more")
    owned = [p for p in local_shards if p.owned and p.data.numel()]
    return Snapshot(
        step=step,
        local_shards=tuple(owned) if copies is None else copies.take(owned),
        rng=rng_state(),
        state=state,
        model_files=model_files,
    )


def key_of(piece: LocalShard) -> str:
    """Return a shard's key in its rank's file."""
    return f"{piece.kind}/{piece.name}@{'.'.join(map(str, piece.offset))}"


def write_snapshot(
    snapshot: Snapshot, root: Store, topology: Topology, group: ProcessGroup, after: Callable[[], None] | None = None
) -> str:
    """Write every rank's part, then the manifest, then give the folder its final name. Collective over `group`.

    Args:
        snapshot: This rank's snapshot.
        root: The folder of all checkpoints of a run.
        topology: The engine's topology.
        group: A process group of all of the engine's ranks; a separate group if the engine continues in the meantime.
        after: A function that is called on rank 0 when the checkpoint is complete.

    Returns:
        The path or URL of the checkpoint.

    Raises:
        CheckpointError: The checkpoint cannot be written; earlier checkpoints are untouched.
    """
    name, main = folder_name(snapshot.step), topology.is_main

    def begin() -> str:
        with _disk_errors(root):
            return root.begin(name).name

    # The name has a random part or the number of an attempt, so one rank chooses it for all.
    folder = root.child(call_on_first(begin, group))
    file = f"rank-{topology.rank:05d}.safetensors"
    files: dict[str, Any] = {}
    complete = False
    try:
        # Each rank writes a file with the slices that it owns. If one fails, all raise before there is a manifest.
        with collective_errors(group), _disk_errors(root):
            index, entry = _write_rank(folder, file, snapshot.local_shards)
            if main:
                for path, data in snapshot.model_files().items():
                    folder.write(f"{MODEL}{path}", data)
                    files[f"{MODEL}{path}"] = {"bytes": len(data), "xxh3": digests_of(data)}
        parts = all_gather_object((index, entry, {"rng": snapshot.rng, "machine": describe_machine()}), group)
        final = ""
        with collective_errors(group), _disk_errors(root):
            if main:
                manifest = {
                    "format": FORMAT,
                    "step": snapshot.step,
                    "parallel": asdict(topology.parallel),
                    "world_size": topology.size,
                    **snapshot.state,
                    "files": {**{f"rank-{r:05d}.safetensors": entry for r, (_, entry, _) in enumerate(parts)}, **files},
                    "ranks": [state for _, _, state in parts],
                    "tensors": merge_index([index for index, _, _ in parts]),
                }
                # The manifest comes last: a folder with one counts as complete, so all files must be written by now.
                write_manifest(folder, manifest)
                complete = True
                final = str(root.commit(folder, name))
                if after is not None:
                    after()
        # Also a barrier: no rank returns before the checkpoint has its final name.
        return str(all_gather_object(final, group)[0])
    except Exception:
        # A local folder keeps its temporary name until `commit` has succeeded, and an older attempt at this step is still
        # there. In an object store a complete folder stays even if `commit` or `after` has failed: `commit` may have
        # deleted the older attempt, so it may be the only checkpoint.
        if main and folder.name != name and (not complete or folder.name.startswith(TEMPORARY)):
            with suppress(OSError):
                root.remove(folder.name)
        raise


@contextmanager
def _disk_errors(root: Store) -> Iterator[None]:
    """Raise an `OSError` in the block as a `CheckpointError` that says what to do about it."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"{disk_error(f'the checkpoint in {root}', e)}. Earlier checkpoints are untouched") from e


def _write_rank(store: Store, file: str, shards: Iterable[LocalShard]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write a rank's file; return its part of the tensor index and its entry in the list of files."""
    by_key = {key_of(p): p for p in shards}
    index: dict[str, Any] = {}
    with store.create(file) as out:
        writer = TensorWriter(out, {key: (DTYPES[p.data.dtype], p.data.shape) for key, p in by_key.items()})
        for key, shard in by_key.items():
            writer.write(key, host_bytes(shard.data))
            entry = index.setdefault(shard.name, {"shape": list(shard.shape), "kinds": {}})
            kind = entry["kinds"].setdefault(shard.kind, {"dtype": DTYPES[shard.data.dtype], "boxes": []})
            kind["boxes"].append({"offset": list(shard.offset), "length": list(shard.data.shape), "file": file, "key": key})
        return index, writer.finish()

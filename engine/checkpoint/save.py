"""An engine's state to a checkpoint folder: taken as it is at one moment, then written. Knows no backend."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import CheckpointError, disk_error
from ..parallel.collectives import all_gather_object, collective_errors
from ..parallel.topology import Topology
from .local_shards import DTYPES, LocalShard, host_bytes
from .manifest import FORMAT, MODEL, merge_index, write_manifest
from .retention import folder_name
from .rng import rng_state
from .safetensors_io import TensorWriter, digests_of
from .storage import Store


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """One rank's part of a checkpoint, before it is written.

    Args:
        step: its number.
        pieces: the boxes that this rank writes.
        rng: this rank's random state.
        state: what else the manifest holds, JSON-able, the same on every rank.
        model_files: config and tokenizer, by name; asked for on the first rank alone.
    """

    step: int
    pieces: tuple[LocalShard, ...]
    rng: Mapping[str, Any]
    state: Mapping[str, Any]
    model_files: Callable[[], Mapping[str, bytes]]


class HostCopies:
    """Room on the host for copies of tensors, kept from one save to the next: pages once touched are fast."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def reserve(self, pieces: Iterable[LocalShard]) -> None:
        """Touch all the room that `take` will need, so that the first copy is as fast as the others."""
        for piece in pieces:
            if piece.owned and piece.data.numel():
                self._kept[key_of(piece)] = self._room(None, piece.data).zero_()

    @staticmethod
    def _room(kept: Tensor | None, data: Tensor) -> Tensor:
        if kept is not None and (kept.dtype, kept.shape) == (data.dtype, data.shape):
            return kept
        return torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)

    def take(self, pieces: Iterable[LocalShard]) -> tuple[LocalShard, ...]:
        """The pieces with copies of their data, made by the time it returns."""
        before, self._kept = self._kept, {}
        found, cuda = [], False
        for piece in pieces:
            key, data = key_of(piece), piece.data
            room = self._room(before.get(key), data)
            room.copy_(data.detach(), non_blocking=True)
            cuda = cuda or data.is_cuda
            self._kept[key] = room
            found.append(LocalShard(kind=piece.kind, name=piece.name, shape=piece.shape, offset=piece.offset, data=room))
        if cuda:
            torch.cuda.synchronize()
        return tuple(found)


def take_snapshot(
    step: int,
    pieces: Iterable[LocalShard],
    state: Mapping[str, Any],
    model_files: Callable[[], Mapping[str, bytes]],
    copies: HostCopies | None = None,
) -> Snapshot:
    """This rank's part of a checkpoint.

    Args:
        step: its number.
        pieces: this rank's boxes, of which it writes those that it owns.
        state: what else the manifest holds.
        model_files: config and tokenizer.
        copies: copies the tensors, so that training can go on while they are written; None leaves them where they are.
    """
    if step < 0:
        raise CheckpointError(f"step={step}; a checkpoint's number is 0 or more")
    owned = [p for p in pieces if p.owned and p.data.numel()]
    return Snapshot(
        step=step,
        pieces=tuple(owned) if copies is None else copies.take(owned),
        rng=rng_state(),
        state=state,
        model_files=model_files,
    )


def key_of(piece: LocalShard) -> str:
    """A piece's key in its rank's file."""
    return f"{piece.kind}/{piece.name}@{'.'.join(map(str, piece.offset))}"


def write_snapshot(
    snapshot: Snapshot, root: Store, topology: Topology, group: ProcessGroup, after: Callable[[], None] | None = None
) -> str:
    """Write every rank's part, then the manifest, then give the folder its name. Collective over `group`.

    Args:
        snapshot: of this rank.
        root: folder of all checkpoints of a run.
        topology: of the engine.
        group: of all its ranks; of its own where the engine works on meanwhile.
        after: called on the first rank when the checkpoint is complete.

    Returns:
        path or URL of the checkpoint.

    Raises:
        CheckpointError: it cannot be written; those saved before are untouched.
    """
    name, main = folder_name(snapshot.step), topology.is_main
    begun = ""
    with collective_errors(group), _disk_errors(root):
        if main:
            begun = root.begin(name).name
    made = root.child(str(all_gather_object(begun, group)[0]))
    file = f"rank-{topology.rank:05d}.safetensors"
    files: dict[str, Any] = {}
    try:
        with collective_errors(group), _disk_errors(root):
            index, entry = _write_rank(made, file, snapshot.pieces)
            if main:
                for path, data in snapshot.model_files().items():
                    made.write(f"{MODEL}{path}", data)
                    files[f"{MODEL}{path}"] = {"bytes": len(data), "xxh3": digests_of(data)}
        parts = all_gather_object((index, entry, snapshot.rng), group)
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
                    "ranks": [{"rng": rng} for _, _, rng in parts],
                    "tensors": merge_index([index for index, _, _ in parts]),
                }
                write_manifest(made, manifest)
                final = str(root.publish(made, name))
                if after is not None:
                    after()
        return str(all_gather_object(final, group)[0])
    except Exception:
        if main and made.name != name:
            with suppress(OSError):
                root.remove(made.name)
        raise


@contextmanager
def _disk_errors(root: Store) -> Iterator[None]:
    """Raise an `OSError` of the block as a `CheckpointError` that says what to do about it."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"{disk_error(f'the checkpoint in {root}', e)}. Those saved before are untouched") from e


def _write_rank(store: Store, file: str, pieces: Iterable[LocalShard]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write a rank's file; its part of the index, and its entry among the files."""
    by_key = {key_of(p): p for p in pieces}
    index: dict[str, Any] = {}
    with store.create(file) as out:
        writer = TensorWriter(out, {key: (DTYPES[p.data.dtype], p.data.shape) for key, p in by_key.items()})
        for key, piece in by_key.items():
            writer.write(key, host_bytes(piece.data))
            entry = index.setdefault(piece.name, {"shape": list(piece.shape), "kinds": {}})
            kind = entry["kinds"].setdefault(piece.kind, {"dtype": DTYPES[piece.data.dtype], "boxes": []})
            kind["boxes"].append({"offset": list(piece.offset), "length": list(piece.data.shape), "file": file, "key": key})
        return index, writer.finish()

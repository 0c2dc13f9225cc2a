"""A checkpoint of any layout into an engine's memory, by boxes. Knows no backend."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ..errors import CheckpointError
from ..parallel.topology import Topology
from .local_shards import DTYPES, LocalShard, read_part
from .manifest import Manifest, StoredTensor
from .rng import check_rng, restore_rng, seed_all
from .safetensors_io import TensorFiles
from .storage import Store
from .tensor_slices import intersect
from .thread_pool import in_parallel

READERS = 4


@dataclass(frozen=True, kw_only=True)
class RestoredState:
    """What a loaded checkpoint says beside tensors.

    Args:
        step: its number.
        extra: the trainer's and loader's state.
        model: path of the model that training began with.
        fingerprint: of that model; None where the checkpoint does not say.
        same_layout: the same ranks in the same grid: random state was restored too, and the run continues to the bit.
    """

    step: int
    extra: Mapping[str, Any]
    same_layout: bool
    model: str | None = None
    fingerprint: str | None = None


def load_state(
    store: Store,
    *,
    topology: Topology,
    pieces: Callable[[], Iterable[LocalShard]],
    optimizer: str | None,
    verify: bool,
) -> Manifest:
    """Fill this rank's boxes from a checkpoint of any layout. Collective.

    Args:
        store: the checkpoint's folder.
        topology: of the engine.
        pieces: gives this rank's boxes, which are written into.
        optimizer: its name, where its state is needed.
        verify: compare what is read with the checksums.

    Returns:
        the manifest, for what is no tensor.
    """
    with topology.collective_errors():
        manifest = Manifest.read(store)
        mine = list(pieces())
        saved = (manifest.data["optim"] or {}).get("name")
        if optimizer is not None and saved != optimizer:
            raise CheckpointError(
                f"{store} was saved {'without an optimizer' if saved is None else f'with optim.name={saved}'}, but this run has "
                f"optim.name={optimizer}; use the same, or start from exported weights"
            )
        _check_shards(manifest, mine)
        _check_state(manifest, mine, topology, optimizer)
    held = set().union(*topology.all_gather_object({p.name for p in mine}))
    left = sorted(set(manifest.names) - held)
    if left:
        raise CheckpointError(
            f"{store} has {len(left)} tensors that the model has not, {', '.join(left[:3])} among them; it is a checkpoint of "
            "another model"
        )
    # Nothing has been changed so far; from here on all ranks go on together.
    with topology.collective_errors():
        fill(manifest, mine, manifest.tensor_files(verify=verify))
    return manifest


def restore_random_state(manifest: Manifest, topology: Topology, *parts: int) -> bool:
    """Give every rank its random state back, or in another layout a fresh one from seed numbers; whether it was given back."""
    same = _same_layout(manifest, topology)
    if same:
        restore_rng(manifest.data["ranks"][topology.rank]["rng"])
    else:
        seed_all(*parts, topology.seed_rank)
    return same


def _same_layout(manifest: Manifest, topology: Topology) -> bool:
    return bool(manifest.data["world_size"] == topology.size and manifest.data["parallel"] == asdict(topology.parallel))


def _check_state(manifest: Manifest, pieces: Iterable[LocalShard], topology: Topology, optimizer: str | None) -> None:
    """Look at what is no tensor while nothing has been changed yet."""
    if _same_layout(manifest, topology):
        try:
            check_rng(manifest.data["ranks"][topology.rank]["rng"])
        except (ValueError, KeyError, TypeError) as e:
            raise CheckpointError(
                f"{manifest.store} has no random state of rank {topology.rank} that can be taken: {e}"
            ) from e
    if optimizer is not None:
        counts = (manifest.data["optimizer"] or {}).get("step") or {}
        missing = [p.name for p in pieces if p.kind != "value" and p.name not in counts]
        if missing:
            raise CheckpointError(f"{manifest.store} does not say how many steps {missing[0]} has been updated in")


def _check_shards(manifest: Manifest, pieces: Iterable[LocalShard]) -> None:
    tensors = manifest.data["tensors"]
    for piece in pieces:
        entry = tensors.get(piece.name)
        if entry is None or piece.kind not in entry["kinds"]:
            raise CheckpointError(
                f"{manifest.store} has no {piece.kind} of {piece.name}; it is a checkpoint of another model, of other "
                "adapters, or of another head"
            )
        dtype = entry["kinds"][piece.kind]["dtype"]
        if dtype != DTYPES[piece.data.dtype]:
            raise CheckpointError(
                f"{piece.kind} of {piece.name} is {DTYPES[piece.data.dtype]} in the model and {dtype} in {manifest.store}; use the "
                "engine.precision.params that it was saved with"
            )
        if tuple(entry["shape"]) != piece.shape:
            raise CheckpointError(
                f"{piece.name} is {list(piece.shape)} in the model and {entry['shape']} in {manifest.store}; it is a "
                "checkpoint of another model"
            )


def fill(manifest: Manifest, pieces: Iterable[LocalShard], files: TensorFiles) -> None:
    """Write a checkpoint's numbers into views, several at a time.

    Raises:
        DamagedError: a checksum differs.
        CheckpointError: a part is not covered, or not what the manifest says.
    """
    kinds: dict[str, Mapping[str, StoredTensor]] = {}

    def one(piece: LocalShard) -> None:
        found = kinds[piece.name][piece.kind]
        filled = 0
        for stored in found.boxes:
            shared = intersect(piece.box, stored.box)
            if shared is not None:
                manifest.check_box(files, stored, found.dtype)
                target = piece.data[shared.within(piece.offset)] if piece.offset else piece.data
                read_part(files, stored.file, stored.key, shared.seen_from(stored.box.offset), target)
                filled += shared.volume
        if filled != piece.box.volume:
            raise CheckpointError(
                f"{manifest.store} covers {filled} of the {piece.box.volume} elements of {piece.kind} of {piece.name}"
            )

    wanted = list(pieces)
    for piece in wanted:
        if piece.name not in kinds:
            kinds[piece.name] = manifest.kinds(piece.name)
    in_parallel(READERS, (partial(one, piece) for piece in wanted))

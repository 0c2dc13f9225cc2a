"""Loading a checkpoint of any layout into an engine's memory, by tensor slices. Independent of the backend."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ..errors import CheckpointError
from ..parallel.topology import Topology
from .local_shards import DTYPES, LocalShard, read_part
from .machine import warn_if_machine_differs
from .manifest import CheckpointManifest, StoredTensor
from .rng import check_rng, restore_rng, seed_all
from .safetensors_io import TensorFiles
from .storage import Store
from .tensor_slices import intersect
from .thread_pool import in_parallel

READERS = 4
SAME_MODEL = (
    "it is a checkpoint of another model, of other trained parts or of another head; use the model.path, model.lora.* and "
    "model.head that it was saved with"
)


@dataclass(frozen=True, kw_only=True)
class RestoredState:
    """The non-tensor state of a loaded checkpoint.

    Args:
        step: The checkpoint's step.
        extra: The state of the trainer and the data loader.
        model: The path of the model that training started from.
        fingerprint: The fingerprint of that model; None if the checkpoint does not have it.
        same_layout: Whether the world size and the parallel layout are unchanged: then the random state was restored too, and
            the run continues bit-identically.
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
    local_shards: Callable[[], Iterable[LocalShard]],
    optimizer: str | None,
    verify: bool,
) -> CheckpointManifest:
    """Fill this rank's local shards from a checkpoint of any layout. Collective.

    Args:
        store: The checkpoint's folder.
        topology: The engine's topology.
        local_shards: A function that returns this rank's local shards, which are written into.
        optimizer: The name of the optimizer if its state is needed, otherwise None.
        verify: Whether to verify checksums when reading.

    Returns:
        The manifest, for the non-tensor state.
    """
    with topology.collective_errors():
        manifest = CheckpointManifest.read(store)
        shards = list(local_shards())
        saved = (manifest.data["optim"] or {}).get("name")
        if optimizer is not None and saved != optimizer:
            raise CheckpointError(
                f"{store} was saved {'without an optimizer' if saved is None else f'with optim.name={saved}'}, but this run "
                f"has optim.name={optimizer}; use the same optimizer, or start from exported weights"
            )
        _check_shards(manifest, shards)
        _check_state(manifest, shards, topology, optimizer)
    # A rank has only the tensors of its stage and its experts, so unknown ones show only in all ranks' names.
    model_names = set().union(*topology.all_gather_object({p.name for p in shards}))
    unknown = sorted(set(manifest.names) - model_names)
    if unknown:
        raise CheckpointError(
            f"{store} has {len(unknown)} tensors that the model does not have, including {', '.join(unknown[:3])}; {SAME_MODEL}"
        )
    # Nothing has been changed so far; from here on, all ranks continue together.
    with topology.collective_errors():
        fill(manifest, shards, manifest.tensor_files(verify=verify))
    return manifest


def restore_random_state(manifest: CheckpointManifest, topology: Topology, *parts: int) -> bool:
    """Restore every rank's random state, or seed a new one if the layout differs; return whether it was restored."""
    same = _same_layout(manifest, topology)
    if same:
        restore_rng(manifest.data["ranks"][topology.rank]["rng"])
        if topology.is_main:
            warn_if_machine_differs(manifest.store, manifest.data["ranks"][0].get("machine"))
    else:
        # The saved states belong to ranks with other parts of the model and of the data, so a new one is derived from
        # the seed and the step.
        seed_all(*parts, topology.seed_rank)
    return same


def _same_layout(manifest: CheckpointManifest, topology: Topology) -> bool:
    return bool(manifest.data["world_size"] == topology.size and manifest.data["parallel"] == asdict(topology.parallel))


def _check_state(
    manifest: CheckpointManifest, shards: Iterable[LocalShard], topology: Topology, optimizer: str | None
) -> None:
    """Check the non-tensor state before anything is changed."""
    if _same_layout(manifest, topology):
        try:
            check_rng(manifest.data["ranks"][topology.rank]["rng"])
        except (ValueError, KeyError, TypeError) as e:
            raise CheckpointError(f"{manifest.store} has no usable random state for rank {topology.rank}: {e}") from e
    if optimizer is not None:
        counts = (manifest.data["optimizer"] or {}).get("step") or {}
        missing = [p.name for p in shards if p.kind != "value" and p.name not in counts]
        if missing:
            raise CheckpointError(f"{manifest.store} has no update count for {missing[0]}")


def _check_shards(manifest: CheckpointManifest, shards: Iterable[LocalShard]) -> None:
    tensors = manifest.data["tensors"]
    for shard in shards:
        entry = tensors.get(shard.name)
        if entry is None or shard.kind not in entry["kinds"]:
            raise CheckpointError(f"{manifest.store} has no {shard.kind} of {shard.name}; {SAME_MODEL}")
        dtype = entry["kinds"][shard.kind]["dtype"]
        if dtype != DTYPES[shard.data.dtype]:
            raise CheckpointError(
                f"{shard.kind} of {shard.name} is {DTYPES[shard.data.dtype]} in the model and {dtype} in {manifest.store}; "
                "use the engine.precision.params that it was saved with"
            )
        if tuple(entry["shape"]) != shard.shape:
            raise CheckpointError(
                f"{shard.name} is {list(shard.shape)} in the model and {entry['shape']} in {manifest.store}; {SAME_MODEL}"
            )


def fill(manifest: CheckpointManifest, local_shards: Iterable[LocalShard], files: TensorFiles) -> None:
    """Copy a checkpoint's values into local shards, several at a time.

    Raises:
        DamagedError: A checksum differs.
        CheckpointError: A shard is not fully covered, or a slice differs from the manifest.
    """
    kinds: dict[str, Mapping[str, StoredTensor]] = {}

    def fill_shard(shard: LocalShard) -> None:
        tensor = kinds[shard.name][shard.kind]
        filled = 0
        for stored in tensor.boxes:
            shared = intersect(shard.box, stored.box)
            if shared is not None:
                manifest.check_slice(files, stored, tensor.dtype)
                target = shard.data[shared.within(shard.offset)] if shard.offset else shard.data
                read_part(files, stored.file, stored.key, shared.seen_from(stored.box.offset), target)
                filled += shared.volume
        # Gaps would otherwise leave the values that were in memory before.
        if filled != shard.box.volume:
            raise CheckpointError(
                f"{manifest.store} covers only {filled} of the {shard.box.volume} elements of {shard.kind} of {shard.name}"
            )

    # The entries of the manifest are parsed here, once per tensor, and the threads below only read the result.
    shards = list(local_shards)
    for shard in shards:
        if shard.name not in kinds:
            kinds[shard.name] = manifest.kinds(shard.name)
    in_parallel(READERS, (partial(fill_shard, shard) for shard in shards))

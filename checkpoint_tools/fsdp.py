"""Checkpoints of foreign FSDP runs: DCP folders, and verl's `model_world_size_W_rank_R.pt`.

This module handles the parts that are specific to them: the names of parameters, and the layout of shards in files.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..engine.checkpoint.hf_folder import Entry
from ..engine.checkpoint.local_shards import DTYPES
from ..engine.checkpoint.tensor_slices import StoredSlice, TensorSlice, intersect, whole
from ..engine.config import ModelConfig
from ..engine.errors import CheckpointError
from .foreign import ForeignTensors, MappedSource, TensorPlacement, copy_part, load_tensors, parameters_of

MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARD = re.compile(r"(model|optim)_world_size_(\d+)_rank_(\d+)\.pt")


def kinds_of(
    tensors: ForeignTensors, model: ModelConfig, files: Mapping[str, bytes]
) -> tuple[dict[str, MappedSource], dict[str, str]]:
    """Map the values and, if they are stored by name, the moments of a Hugging Face model that FSDP has sharded.

    Args:
        tensors: The tensors of the checkpoint.
        model: The model whose config determines the parameters.
        files: The config and tokenizer files.

    Returns:
        A mapping from kind to source and, if there are moments, a mapping from name on disk to the foreign name of its step
        count.

    Raises:
        CheckpointError: The parameters of the checkpoint are not those of the model.
    """
    parts, in_memory = parameters_of(model, value_head=any(name.endswith("score.weight") for name in tensors.entries))
    # Older versions of transformers kept the experts of a mixture in memory in the same form as on disk.
    on_disk = {
        s.name: [StoredSlice(s.name, s.shape, whole(s.shape))] for stored_slices in parts.values() for s in stored_slices
    }
    kinds = parts if any(name.endswith(tuple(parts.keys() - on_disk.keys())) for name in tensors.entries) else on_disk
    shapes = {name: in_memory.get(name, stored_slices[0].shape) for name, stored_slices in kinds.items()}
    # Programs store a model under different prefixes, such as `model.`.
    prefix = _prefix(tensors, shapes, "")
    roots = {name.partition(".")[0] for name in shapes}
    unknown = [
        name
        for name in tensors.entries
        if name.startswith(prefix)
        # Only names that look like the model's: the checkpoint may hold other state under the same prefix.
        and name.removeprefix(prefix).partition(".")[0] in roots
        and name.removeprefix(prefix) not in shapes
        and not name.endswith((*(f".{kind}" for kind in MOMENTS), ".step", "inv_freq"))
        # Tied embeddings may have been saved under both names.
        and not (name == f"{prefix}lm_head.weight" and any(n.endswith(".embed_tokens.weight") for n in shapes))
    ]
    if unknown:
        raise CheckpointError(
            f"{tensors.label} has {unknown[0]} ({len(unknown)} in total), which the model does not have; it is a checkpoint "
            "of a different model than --model"
        )
    mapped = {"value": MappedSource(tensors, _places(tensors, kinds, shapes, prefix, ""), files)}
    stems = [_prefix(tensors, shapes, f".{kind}", partly=True) for kind in MOMENTS]
    # Moments of some parameters only could not be resumed from, so they count as absent.
    if None in stems or any(
        f"{stem}{n}.{kind}" not in tensors.entries for n in shapes for kind, stem in zip(MOMENTS, stems, strict=True)
    ):
        return mapped, {}
    for kind, stem in zip(MOMENTS, stems, strict=True):
        mapped[kind] = MappedSource(tensors, _places(tensors, kinds, shapes, stem, f".{kind}"), files)
    return mapped, {s.name: f"{stems[0]}{name}.step" for name, stored_slices in kinds.items() for s in stored_slices}


def _prefix(tensors: ForeignTensors, shapes: Mapping[str, tuple[int, ...]], suffix: str, *, partly: bool = False) -> Any:
    """Find the prefix of the parameter names, by majority; with `partly`, return None if no parameter matches."""
    votes = Counter(
        name[: -len(name_in_model + suffix)]
        for name_in_model in shapes
        for name, (_, shape) in tensors.entries.items()
        if name.endswith(name_in_model + suffix) and shape == shapes[name_in_model]
    )
    if votes:
        # The most frequent one, and the shortest of several, so that the result does not depend on the order of names.
        prefix = min(votes, key=lambda p: (-votes[p], len(p)))
        missing = [n for n in shapes if f"{prefix}{n}{suffix}" not in tensors.entries]
        if not missing or partly:
            return prefix
        raise CheckpointError(
            f"{tensors.label} has no {prefix}{missing[0]} ({len(missing)} in total); it is a checkpoint of a different model "
            "than --model"
        )
    if partly:
        return None
    raise CheckpointError(
        f"{tensors.label} has none of the model's parameters, such as {next(iter(shapes))}; its first tensors are "
        f"{', '.join(list(tensors.entries)[:3])}"
    )


def _places(
    tensors: ForeignTensors,
    slices_by_name: Mapping[str, Sequence[StoredSlice]],
    shapes: Mapping[str, tuple[int, ...]],
    prefix: str,
    suffix: str,
) -> list[TensorPlacement]:
    places = []
    for name, stored_slices in slices_by_name.items():
        foreign = f"{prefix}{name}{suffix}"
        if tensors.entries[foreign][1] != shapes[name]:
            raise CheckpointError(
                f"{tensors.label} has {foreign} with shape {list(tensors.entries[foreign][1])}, the model with "
                f"{list(shapes[name])}; it is a checkpoint of a different model than --model"
            )
        places += [TensorPlacement(foreign, (), segment) for segment in stored_slices]
    return places


class ShardFiles:
    """Tensors in one file per rank, as saved by verl: DTensors by name, which stay in their files until they are read.

    Args:
        folder: The folder that contains `model_world_size_W_rank_R.pt`.
        trust: Whether to read pickles that could run code.

    Raises:
        CheckpointError: The file of a rank is missing, or does not contain tensors.
    """

    def __init__(self, folder: Path, *, trust: bool = False) -> None:
        self.label = str(folder)
        if not shard_files(folder, "model"):
            raise CheckpointError(f"{folder} has no model_world_size_W_rank_R.pt")
        self._parts: dict[str, list[tuple[TensorSlice, Tensor]]] = {}
        self.entries: dict[str, Entry] = {}
        self.steps: dict[str, float] = {}
        for path in shard_files(folder, "model"):
            for name, tensor in load_tensors(path, str(path), trust=trust, mmap=True).items():
                self._add(path, name, tensor)
        for path in shard_files(folder, "optim"):
            state = load_tensors(path, str(path), trust=trust, mmap=True).get("state", {})
            for name, kinds in state.items():
                # With numbers instead of names, it is unknown which parameters the moments belong to.
                if isinstance(name, str):
                    for kind in MOMENTS:
                        self._add(path, f"{name}.{kind}", kinds[kind])
                    self.steps[f"{name}.step"] = float(kinds["step"])

    def _add(self, path: Path, name: str, tensor: Any) -> None:
        if isinstance(tensor, DTensor):
            # There is no process group here, so the stored local part is used with the placements that were recorded.
            shape, local = tuple(tensor.shape), tensor._local_tensor
            local_slice = _slice_of(path, name, tensor)
        elif isinstance(tensor, Tensor):
            shape, local, local_slice = tuple(tensor.shape), tensor, whole(tensor.shape)
        else:
            raise CheckpointError(f"{path} has {name} as {type(tensor).__name__}, which is not a tensor")
        entry = self.entries.setdefault(name, (DTYPES[tensor.dtype], shape))
        if entry != (DTYPES[tensor.dtype], shape):
            raise CheckpointError(
                f"{path} has {name} as {DTYPES[tensor.dtype]} {list(shape)}, but another rank has it as {entry}"
            )
        parts = self._parts.setdefault(name, [])
        # Replicas hold the same slice.
        if local.numel() and all(local_slice != other for other, _ in parts):
            parts.append((local_slice, local))

    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """See `ForeignTensors`."""
        filled = 0
        for local_slice, local in self._parts[name]:
            shared = intersect(part, local_slice)
            if shared is not None:
                inside = shared.seen_from(local_slice.offset)
                copy_part(local, inside, out[shared.within(part.offset)] if part.offset else out)
                filled += shared.volume
        if filled != part.volume:
            raise CheckpointError(f"{self.label} covers only {filled} of the {part.volume} elements of a part of {name}")

    def scalar(self, name: str) -> float | None:
        """Return a step count, or None if there is none with this name."""
        return self.steps.get(name)


def shard_files(folder: Path, what: str) -> list[Path]:
    """List verl's files of a kind (`model` or `optim`) in rank order; the list is empty if there are none.

    Raises:
        CheckpointError: The files of some ranks are missing, or belong to several runs.
    """
    path_by_rank = {}
    sizes = set()
    for path in folder.iterdir():
        match = _SHARD.fullmatch(path.name)
        if match is not None and match[1] == what:
            sizes.add(int(match[2]))
            path_by_rank[int(match[3])] = path
    if len(sizes) > 1:
        raise CheckpointError(f"{folder} has files of runs with {sorted(sizes)} ranks; keep those of only one run")
    missing = sorted(set(range(max(sizes, default=0))) - set(path_by_rank))
    if missing:
        raise CheckpointError(f"{folder} has no file of rank {missing[0]} of {max(sizes)} ({what}); copy it there as well")
    return [path_by_rank[rank] for rank in sorted(path_by_rank)]


def _slice_of(path: Path, name: str, tensor: DTensor) -> TensorSlice:
    """Locate a rank's local shard in the full tensor, from the placements and the rank in the file's name."""
    match = _SHARD.fullmatch(path.name)
    assert match is not None
    mesh = tensor._spec.mesh.mesh
    coordinate = (mesh == int(match[3])).nonzero()
    if len(coordinate) != 1:
        raise CheckpointError(f"{path}: rank {match[3]} is not in the mesh of {name}")
    offset, length = [0] * tensor.dim(), list(tensor.shape)
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:
            raise CheckpointError(f"{path}: {name} has the placement {placement}, which is not supported")
        d, size, rank = placement.dim, mesh.shape[axis], int(coordinate[0][axis])
        # Like torch.chunk: all parts have the size of the first, except the last ones.
        step = -(-length[d] // size)
        first = min(rank * step, length[d])
        offset[d], length[d] = offset[d] + first, min(step, length[d] - first)
    return TensorSlice(tuple(offset), tuple(length))

"""Checkpoints of FSDP runs of others: DCP folders, and verl's `model_world_size_W_rank_R.pt`.

What is theirs alone: how parameters are named, and how shards lie in files.
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
from .foreign import ForeignTensors, Mapped, Place, copy_part, load_tensors, parameters_of

MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARD = re.compile(r"(model|optim)_world_size_(\d+)_rank_(\d+)\.pt")


def kinds_of(
    tensors: ForeignTensors, model: ModelConfig, files: Mapping[str, bytes]
) -> tuple[dict[str, Mapped], dict[str, str]]:
    """The values and, where they are stored by name, the moments of a Hugging Face model that FSDP has sharded.

    Args:
        tensors: of the checkpoint.
        model: whose config tells the parameters.
        files: config and tokenizer.

    Returns:
        kind -> source; and, where there are moments, name on disk -> foreign name of its count of steps.

    Raises:
        CheckpointError: parameters that the checkpoint does not have.
    """
    parts, in_memory = parameters_of(model, value_head=any(name.endswith("score.weight") for name in tensors.entries))
    # An older transformers held the experts of a mixture as they lie on disk.
    apart = {s.name: [StoredSlice(s.name, s.shape, whole(s.shape))] for segments in parts.values() for s in segments}
    known = parts if any(name.endswith(tuple(parts.keys() - apart.keys())) for name in tensors.entries) else apart
    shapes = {name: in_memory.get(name, segments[0].shape) for name, segments in known.items()}
    prefix = _prefix(tensors, shapes, "")
    roots = {name.partition(".")[0] for name in shapes}
    more = [
        name
        for name in tensors.entries
        if name.startswith(prefix)
        and name.removeprefix(prefix).partition(".")[0] in roots
        and name.removeprefix(prefix) not in shapes
        and not name.endswith((*(f".{kind}" for kind in MOMENTS), ".step", "inv_freq"))
        # Tied embeddings may have been saved under both names.
        and not (name == f"{prefix}lm_head.weight" and "model.embed_tokens.weight" in shapes)
    ]
    if more:
        raise CheckpointError(
            f"{tensors.label} has {more[0]} ({len(more)} such), which the model has not; it is a checkpoint of another model than "
            "--model"
        )
    found = {"value": Mapped(tensors, _places(tensors, known, shapes, prefix, ""), files)}
    stems = [_prefix(tensors, shapes, f".{kind}", partly=True) for kind in MOMENTS]
    if None in stems or any(
        f"{stem}{n}.{kind}" not in tensors.entries for n in shapes for kind, stem in zip(MOMENTS, stems, strict=True)
    ):
        return found, {}
    for kind, stem in zip(MOMENTS, stems, strict=True):
        found[kind] = Mapped(tensors, _places(tensors, known, shapes, stem, f".{kind}"), files)
    return found, {s.name: f"{stems[0]}{name}.step" for name, segments in known.items() for s in segments}


def _prefix(tensors: ForeignTensors, shapes: Mapping[str, tuple[int, ...]], suffix: str, *, partly: bool = False) -> Any:
    """What stands before the parameters' names: the most common of what is found; None for none where `partly`."""
    votes = Counter(
        name[: -len(known + suffix)]
        for known in shapes
        for name, (_, shape) in tensors.entries.items()
        if name.endswith(known + suffix) and shape == shapes[known]
    )
    if votes:
        prefix = min(votes, key=lambda p: (-votes[p], len(p)))
        missing = [n for n in shapes if f"{prefix}{n}{suffix}" not in tensors.entries]
        if not missing or partly:
            return prefix
        raise CheckpointError(
            f"{tensors.label} has no {prefix}{missing[0]} ({len(missing)} such); it is a checkpoint of another model than --model"
        )
    if partly:
        return None
    raise CheckpointError(
        f"{tensors.label} has none of the model's parameters, {next(iter(shapes))} for one; it has {', '.join(list(tensors.entries)[:3])}"
    )


def _places(
    tensors: ForeignTensors,
    known: Mapping[str, Sequence[StoredSlice]],
    shapes: Mapping[str, tuple[int, ...]],
    prefix: str,
    suffix: str,
) -> list[Place]:
    found = []
    for name, segments in known.items():
        foreign = f"{prefix}{name}{suffix}"
        if tensors.entries[foreign][1] != shapes[name]:
            raise CheckpointError(
                f"{tensors.label} has {foreign} as {list(tensors.entries[foreign][1])}, the model as {list(shapes[name])}; it is a "
                "checkpoint of another model than --model"
            )
        found += [Place(foreign, (), segment) for segment in segments]
    return found


class ShardFiles:
    """Tensors in files of one rank each, as verl saves them: DTensors by name, left in their files until they are asked for.

    Args:
        folder: with `model_world_size_W_rank_R.pt`.
        trust: read pickles that could run code.

    Raises:
        CheckpointError: a rank's file is missing, or holds something else.
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
                # Numbers instead of names: whose they are cannot be told.
                if isinstance(name, str):
                    for kind in MOMENTS:
                        self._add(path, f"{name}.{kind}", kinds[kind])
                    self.steps[f"{name}.step"] = float(kinds["step"])

    def _add(self, path: Path, name: str, tensor: Any) -> None:
        if isinstance(tensor, DTensor):
            shape, local = tuple(tensor.shape), tensor._local_tensor
            box = _box_of(path, name, tensor)
        elif isinstance(tensor, Tensor):
            shape, local, box = tuple(tensor.shape), tensor, whole(tensor.shape)
        else:
            raise CheckpointError(f"{path} has {name} as {type(tensor).__name__}, which is no tensor")
        known = self.entries.setdefault(name, (DTYPES[tensor.dtype], shape))
        if known != (DTYPES[tensor.dtype], shape):
            raise CheckpointError(f"{path} has {name} as {DTYPES[tensor.dtype]} {list(shape)}, another rank as {known}")
        parts = self._parts.setdefault(name, [])
        # Replicas hold the same box.
        if local.numel() and all(box != other for other, _ in parts):
            parts.append((box, local))

    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """See `ForeignTensors`."""
        filled = 0
        for box, local in self._parts[name]:
            shared = intersect(part, box)
            if shared is not None:
                inside = shared.seen_from(box.offset)
                copy_part(local, inside, out[shared.within(part.offset)] if part.offset else out)
                filled += shared.volume
        if filled != part.volume:
            raise CheckpointError(f"{self.label} covers {filled} of the {part.volume} elements of a part of {name}")

    def scalar(self, name: str) -> float | None:
        """A count of steps."""
        return self.steps.get(name)


def shard_files(folder: Path, what: str) -> list[Path]:
    """verl's files of a kind (`model` or `optim`), in order of the ranks; empty where there are none.

    Raises:
        CheckpointError: some ranks' are missing.
    """
    found = {}
    sizes = set()
    for path in folder.iterdir():
        match = _SHARD.fullmatch(path.name)
        if match is not None and match[1] == what:
            sizes.add(int(match[2]))
            found[int(match[3])] = path
    if len(sizes) > 1:
        raise CheckpointError(f"{folder} has files of runs of {sorted(sizes)} ranks; leave those of one")
    missing = sorted(set(range(max(sizes, default=0))) - set(found))
    if missing:
        raise CheckpointError(f"{folder} has no file of rank {missing[0]} of {max(sizes)} ({what}); copy it there too")
    return [found[rank] for rank in sorted(found)]


def _box_of(path: Path, name: str, tensor: DTensor) -> TensorSlice:
    """Where a rank's part stands, from the placements and the rank that the file is of."""
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
            raise CheckpointError(f"{path}: {name} is placed as {placement}, which is not known here")
        d, size, rank = placement.dim, mesh.shape[axis], int(coordinate[0][axis])
        # As torch.chunk cuts: all parts as large as the first, but for the last ones.
        step = -(-length[d] // size)
        first = min(rank * step, length[d])
        offset[d], length[d] = offset[d] + first, min(step, length[d] - first)
    return TensorSlice(tuple(offset), tuple(length))

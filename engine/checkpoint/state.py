"""An engine's state to a checkpoint folder and back, by boxes. Knows no backend."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..boxes import Box, Segment, intersect
from ..errors import CheckpointError, disk_error
from ..topology import Topology
from .folder import FORMAT, Manifest, commit, describe_files, merge_index, new_temporary
from .rng import restore_rng, rng_state, seed_all
from .tensorfile import DTYPES, TensorFolder, TensorWriter, checksum


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A box of a global tensor that this rank holds.

    Args:
        kind: value, exp_avg or exp_avg_sq.
        name: the tensor's Hugging Face name.
        shape: the tensor's global shape.
        offset: where the box begins.
        data: a view into live memory; loading writes into it.
        owned: whether this rank writes the box when saving; another rank holds the same one otherwise.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor
    owned: bool = True

    @property
    def box(self) -> Box:
        """In the global tensor."""
        return Box(self.offset, tuple(self.data.shape))


def cut_pieces(kind: str, segments: Iterable[Segment], box: Box, data: Tensor, *, owned: bool = True) -> Iterator[Piece]:
    """The pieces of a box of a parameter.

    Args:
        kind: value, exp_avg or exp_avg_sq.
        segments: what the parameter is made of.
        box: in the parameter.
        data: that box, a view into live memory.
        owned: whether this rank writes them when saving.
    """
    for segment in segments:
        found = segment.part(box)
        if found is None:
            continue
        shared, offset = found
        view = data[shared.within(box.offset)] if box.offset else data
        for _ in range(segment.dropped):
            view = view.select(0, 0)
        yield Piece(kind=kind, name=segment.name, shape=segment.shape, offset=offset, data=view, owned=owned)


@dataclass(frozen=True, kw_only=True)
class RestoredState:
    """What a loaded checkpoint says beside tensors.

    Args:
        step: its number.
        extra: the trainer's and loader's state.
        same_layout: the same ranks in the same grid: random state was restored too, and the run continues to the bit.
    """

    step: int
    extra: Mapping[str, Any]
    same_layout: bool


def save_state(
    root: Path,
    step: int,
    *,
    topology: Topology,
    pieces: Iterable[Piece],
    state: Mapping[str, Any],
    write_model_files: Callable[[Path], None],
) -> Path:
    """Write a checkpoint. Collective; see `BaseEngine.save_checkpoint`.

    Args:
        root: folder of all checkpoints of a run.
        step: its number.
        topology: of the engine.
        pieces: this rank's boxes.
        state: what else the manifest holds, JSON-able, the same on every rank.
        write_model_files: writes config and tokenizer into a folder; called on the first rank.

    Returns:
        the folder.
    """
    temporary = Path(_on_main(topology, root, lambda: str(new_temporary(root, step))))
    error: Exception | None = None
    index: dict[str, Any] = {}
    file = f"rank-{topology.rank:05d}.safetensors"
    try:
        index = _write_rank(temporary / file, pieces)
        if topology.is_main:
            (temporary / "model").mkdir()
            write_model_files(temporary / "model")
    except Exception as e:  # disk full, a broken tensor: the other ranks must hear of it
        error = _unwritten(root, e)
    try:
        topology.agree(error)
        parts = topology.exchange((index, rng_state(), (temporary / file).stat().st_size))

        def finish() -> str:
            manifest = {
                "format": FORMAT,
                "step": step,
                "parallel": asdict(topology.parallel),
                "world_size": topology.size,
                **state,
                "files": {
                    **{f"rank-{r:05d}.safetensors": {"bytes": size} for r, (_, _, size) in enumerate(parts)},
                    **describe_files(temporary, "model"),
                },
                "ranks": [{"rng": rng} for _, rng, _ in parts],
                "tensors": merge_index([index for index, _, _ in parts]),
            }
            return str(commit(temporary, step, manifest))

        return Path(_on_main(topology, root, finish))
    except Exception:
        if topology.is_main:
            with suppress(OSError):
                shutil.rmtree(temporary)
        raise


def _unwritten(root: Path, error: Exception) -> Exception:
    """A disk's error with what to do about it; any other as it is."""
    if not isinstance(error, OSError):
        return error
    return CheckpointError(f"{disk_error(f'the checkpoint in {root}', error)}. Those saved before are untouched")


def _on_main(topology: Topology, root: Path, do: Callable[[], str]) -> str:
    """Run on the first rank; its result, or its error, on all."""
    result, error = "", None
    if topology.is_main:
        try:
            result = do()
        except Exception as e:  # raised on all ranks by agree
            error = _unwritten(root, e)
    topology.agree(error)
    return str(topology.exchange(result)[0])


def _write_rank(path: Path, pieces: Iterable[Piece]) -> dict[str, Any]:
    owned = [p for p in pieces if p.owned and p.data.numel()]
    keys = [f"{p.kind}/{p.name}@{'.'.join(map(str, p.offset))}" for p in owned]
    index: dict[str, Any] = {}
    with TensorWriter(path, {k: (p.data.dtype, p.data.shape) for k, p in zip(keys, owned, strict=True)}) as writer:
        for key, piece in zip(keys, owned, strict=True):
            digest = writer.write(key, piece.data)
            entry = index.setdefault(piece.name, {"shape": list(piece.shape), "kinds": {}})
            kind = entry["kinds"].setdefault(piece.kind, {"dtype": DTYPES[piece.data.dtype], "boxes": []})
            kind["boxes"].append(
                {
                    "offset": list(piece.offset),
                    "length": list(piece.data.shape),
                    "file": path.name,
                    "key": key,
                    "xxh3": digest,
                }
            )
    return index


def load_state(folder: Path, *, topology: Topology, pieces: Callable[[], Iterable[Piece]], optimizer: str | None) -> Manifest:
    """Fill this rank's boxes from a checkpoint of any layout. Collective.

    Args:
        folder: of the checkpoint.
        topology: of the engine.
        pieces: gives this rank's boxes, which are written into.
        optimizer: its name, where its state is needed.

    Returns:
        the manifest, for what is no tensor.
    """
    error: Exception | None = None
    manifest: Manifest | None = None
    mine: list[Piece] = []
    try:
        manifest = Manifest.read(folder)
        mine = list(pieces())
        saved = (manifest.data["optim"] or {}).get("name")
        if optimizer is not None and saved != optimizer:
            raise CheckpointError(
                f"{folder} was saved {'without an optimizer' if saved is None else f'with optim.name={saved}'}, but this run has "
                f"optim.name={optimizer}; use the same, or start from exported weights"
            )
        _check_pieces(manifest, mine)
    except Exception as e:  # raised on all ranks by agree
        error = e
    topology.agree(error)
    assert manifest is not None
    held = set().union(*topology.exchange({p.name for p in mine}))
    left = sorted(set(manifest.names) - held)
    if left:
        raise CheckpointError(
            f"{folder} has {len(left)} tensors that the model has not, {', '.join(left[:3])} among them; it is a checkpoint of "
            "another model"
        )
    # Nothing has been changed so far; from here on all ranks go on together.
    try:
        fill_from_checkpoint(manifest, mine)
    except Exception as e:  # raised on all ranks by agree
        error = e
    topology.agree(error)
    return manifest


def restore_random_state(manifest: Manifest, topology: Topology, *parts: int) -> bool:
    """Give every rank its random state back, or in another layout a fresh one from seed numbers; whether it was given back."""
    same = manifest.data["world_size"] == topology.size and manifest.data["parallel"] == asdict(topology.parallel)
    if same:
        restore_rng(manifest.data["ranks"][topology.rank]["rng"])
    else:
        seed_all(*parts, topology.seed_rank)
    return same


def _check_pieces(manifest: Manifest, pieces: Iterable[Piece]) -> None:
    tensors = manifest.data["tensors"]
    for piece in pieces:
        entry = tensors.get(piece.name)
        if entry is None or piece.kind not in entry["kinds"]:
            raise CheckpointError(
                f"{manifest.folder} has no {piece.kind} of {piece.name}; it is a checkpoint of another model, of other "
                "adapters, or of another head"
            )
        dtype = entry["kinds"][piece.kind]["dtype"]
        if dtype != DTYPES[piece.data.dtype]:
            raise CheckpointError(
                f"{piece.kind} of {piece.name} is {DTYPES[piece.data.dtype]} in the model and {dtype} in {manifest.folder}; use the "
                "engine.precision.params that it was saved with"
            )
        if tuple(entry["shape"]) != piece.shape:
            raise CheckpointError(
                f"{piece.name} is {list(piece.shape)} in the model and {entry['shape']} in {manifest.folder}; it is a "
                "checkpoint of another model"
            )


def fill_from_checkpoint(manifest: Manifest, pieces: Iterable[Piece]) -> None:
    """Write a checkpoint's numbers into views, checking every box that is touched.

    Raises:
        CheckpointError: a checksum differs, or a part is not covered.
    """
    files = TensorFolder(manifest.folder)
    kinds: dict[str, Any] = {}
    for piece in pieces:
        if piece.name not in kinds:
            kinds = {piece.name: manifest.kinds(piece.name)}
        filled = 0
        for stored in kinds[piece.name][piece.kind].boxes:
            shared = intersect(piece.box, stored.box)
            if shared is None:
                continue
            # The whole box is read even for a part of it: its checksum is over all of its bytes.
            source = files.read(stored.file, stored.key, tuple(slice(0, n) for n in stored.box.length))
            if checksum(source) != stored.xxh3:
                raise CheckpointError(
                    f"{manifest.folder / stored.file}: the bytes of {stored.key} do not match their checksum; the file is damaged"
                )
            with torch.no_grad():
                target = piece.data[shared.within(piece.offset)] if piece.offset else piece.data
                target.copy_(source[shared.within(stored.box.offset)] if piece.offset else source)
            filled += shared.volume
        if filled != piece.box.volume:
            raise CheckpointError(f"{manifest.folder} covers {filled} of the {piece.box.volume} elements of {piece.name}")

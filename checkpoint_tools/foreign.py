"""What foreign checkpoints have in common: tensors under names of their own, and their Hugging Face tensors made of those.

Pickles are read by allowlists: what a checkpoint needs, and nothing that runs code.
"""

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..engine.checkpoint.hf_folder import Entry
from ..engine.checkpoint.tensor_slices import StoredSlice, TensorSlice, covers, intersect, whole
from ..engine.config import ModelConfig
from ..engine.errors import CheckpointError
from ..engine.hf.config import read_config
from ..engine.hf.model import HFModel, empty_lm
from ..engine.hf.names import hf_name
from .sources import Source


class ForeignTensors(Protocol):
    """Named tensors of a foreign checkpoint. Threads may share them."""

    @property
    def label(self) -> str:
        """Where they lie, for people."""
        ...

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Name -> (dtype, shape)."""
        ...

    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """Copy a part of a tensor into an array of raw numbers, of the part's shape."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a part of a Hugging Face tensor lies.

    Args:
        name: of the foreign tensor.
        lead: indices on its leading axes, before those that the segment speaks of.
        segment: the part.
    """

    name: str
    lead: tuple[int, ...]
    segment: StoredSlice


class Mapped(Source):
    """Hugging Face tensors made of foreign ones.

    Args:
        tensors: the foreign ones.
        places: of all parts of all tensors.
        files: config, tokenizer and the like.

    Raises:
        CheckpointError: parts that leave a tensor incomplete, or overlap.
    """

    def __init__(self, tensors: ForeignTensors, places: Iterable[Place], files: Mapping[str, bytes]) -> None:
        self._tensors, self._files = tensors, dict(files)
        self._places: dict[str, list[tuple[TensorSlice, Place]]] = {}
        entries: dict[str, Entry] = {}
        for place in places:
            segment = place.segment
            entries[segment.name] = (tensors.entries[place.name][0], segment.shape)
            box = TensorSlice(segment.offset or (0,) * len(segment.shape), segment.box.length[segment.dropped :])
            self._places.setdefault(segment.name, []).append((box, place))
        for name, found in self._places.items():
            if not covers(entries[name][1], [box for box, _ in found]):
                raise CheckpointError(
                    f"{tensors.label}: the parts of {name} do not cover {list(entries[name][1])} exactly once"
                )
        super().__init__(tensors.label, entries)

    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """See `Source`."""
        for box, place in self._places[name]:
            shared = intersect(part, box)
            if shared is None:
                continue
            segment = place.segment
            ahead = (*place.lead, *segment.box.offset[: segment.dropped])
            start = tuple(
                a + b - c for a, b, c in zip(segment.box.offset[segment.dropped :], shared.offset, box.offset, strict=True)
            )
            target = out[shared.within(part.offset)] if part.offset else out
            inside = TensorSlice((*ahead, *start), (*(1 for _ in ahead), *shared.length))
            self._tensors.read(place.name, inside, target[(None,) * len(ahead)])

    def model_files(self) -> dict[str, bytes]:
        """See `Source`."""
        return dict(self._files)


def parameters_of(
    model: ModelConfig, *, value_head: bool = False
) -> tuple[dict[str, list[StoredSlice]], dict[str, tuple[int, ...]]]:
    """A plain transformers model's parameters: what each is made of on disk, and its shape."""
    lm, layout, _ = empty_lm(read_config(model), model, torch.float32)
    root = HFModel(lm, value_head=value_head)
    shapes = {hf_name(name).name: tuple(p.shape) for name, p in root.named_parameters()}
    return {
        name: [StoredSlice(name, shape, whole(shape))] if name.startswith("score.") else layout.segments(name, shape)
        for name, shape in shapes.items()
    }, shapes


def load_pickle(path: Path, allowed: Callable[[str, str], Any], *, trust: bool) -> Any:
    """Read a pickle.

    Args:
        path: of the file.
        allowed: gives the class of a module and name, or None for one that must not be made.
        trust: allow everything: the file may run code.

    Raises:
        CheckpointError: it wants to make something else, or cannot be read.
    """

    # The pure-Python unpickler: of the C one nothing but find_class can be overridden, and a pickle may change attributes of
    # the classes that it was given.
    plain: Any = pickle._Unpickler  # type: ignore[attr-defined]

    class Restricted(plain):  # type: ignore[misc]
        dispatch: ClassVar[dict[int, Any]] = dict(plain.dispatch)

        def load_build(self) -> None:
            if not trust and (isinstance(self.stack[-2], type) or callable(self.stack[-2])):
                raise CheckpointError(f"{path} wants to change {self.stack[-2]!r}, which could run code")
            super().load_build()

        dispatch[pickle.BUILD[0]] = load_build

        def find_class(self, module: str, name: str) -> Any:
            found = allowed(module, name)
            if found is None and not trust:
                raise CheckpointError(
                    f"{path} wants to load {module}.{name}, which could run code; if you trust where it comes from, add "
                    "--trust-pickle"
                )
            return super().find_class(module, name) if found is None else found

    try:
        with open(path, "rb") as file:
            return Restricted(file).load()
    except CheckpointError:
        raise
    except Exception as e:  # of a pickle anything can be wrong
        raise CheckpointError(f"{path} cannot be read: {type(e).__name__} {e}") from e


def load_tensors(source: Any, where: str, *, trust: bool, mmap: bool = False) -> Any:
    """What torch.save wrote, by torch's own safe loading.

    Args:
        source: a path or a file.
        where: for people.
        trust: allow everything: the file may run code.
        mmap: leave tensors in the file until they are asked for.

    Raises:
        CheckpointError: it holds more than tensors and plain data, or cannot be read.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=not trust, mmap=mmap)
    except pickle.UnpicklingError as e:
        first = str(e).partition("\n")[0]
        raise CheckpointError(
            f"{where} holds more than tensors and could run code ({first}); if you trust where it comes from, add --trust-pickle"
        ) from e
    except Exception as e:  # of a pickle anything can be wrong
        raise CheckpointError(f"{where} cannot be read: {type(e).__name__} {e}") from e


def copy_part(tensor: Tensor, part: TensorSlice, out: Any) -> None:
    """A part of a tensor in memory into an array of raw numbers."""
    from ..engine.checkpoint.local_shards import raw

    out[...] = raw(tensor.detach()[part.within((0,) * tensor.dim())])

"""Shared support for foreign checkpoints, whose tensors are mapped from their own names to Hugging Face tensors.

Pickles are read with allowlists, which admit the classes that a checkpoint needs but nothing that runs code.
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
from ..engine.heads import ValueHead
from ..engine.hf.config import read_config
from ..engine.hf.media import media_config
from ..engine.hf.model import HFModel, empty_lm
from ..engine.hf.names import hf_name
from ..engine.model_types import HEAD_PREFIX
from .sources import TensorSource


class ForeignTensors(Protocol):
    """The named tensors of a foreign checkpoint. Several threads may use them at once."""

    @property
    def label(self) -> str:
        """The location of the tensors, for messages."""
        ...

    @property
    def entries(self) -> Mapping[str, Entry]:
        """A mapping from each name to (dtype, shape)."""
        ...

    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """Copy a part of a tensor into an array of raw numbers, of the part's shape."""
        ...


@dataclass(frozen=True)
class TensorPlacement:
    """The location of a part of a Hugging Face tensor in a foreign checkpoint.

    Args:
        name: The name of the foreign tensor.
        lead: The indices on its leading axes, which precede the axes that the segment covers.
        segment: The part of the Hugging Face tensor.
    """

    name: str
    lead: tuple[int, ...]
    segment: StoredSlice


class MappedSource(TensorSource):
    """Hugging Face tensors that are assembled from foreign ones.

    Args:
        tensors: The foreign tensors.
        places: The locations of all parts of all tensors.
        files: The config, tokenizer and similar files, by name.

    Raises:
        CheckpointError: The parts of a tensor leave it incomplete, or overlap.
    """

    def __init__(self, tensors: ForeignTensors, places: Iterable[TensorPlacement], files: Mapping[str, bytes]) -> None:
        self._tensors, self._files = tensors, dict(files)
        self._places: dict[str, list[tuple[TensorSlice, TensorPlacement]]] = {}
        entries: dict[str, Entry] = {}
        for place in places:
            segment = place.segment
            entries[segment.name] = (tensors.entries[place.name][0], segment.shape)
            self._places.setdefault(segment.name, []).append((segment.on_disk, place))
        for name, parts in self._places.items():
            if not covers(entries[name][1], [part_slice for part_slice, _ in parts]):
                raise CheckpointError(
                    f"{tensors.label}: the parts of {name} do not cover {list(entries[name][1])} exactly once"
                )
        super().__init__(tensors.label, entries)

    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """See `TensorSource`."""
        for part_slice, place in self._places[name]:
            shared = intersect(part, part_slice)
            if shared is None:
                continue
            segment = place.segment
            # Indices on axes that the tensor on disk does not have: stacked layers or experts.
            leading = (*place.lead, *segment.box.offset[: segment.dropped])
            # From the position in the Hugging Face tensor to the one in the foreign tensor.
            start = tuple(
                a + b - c
                for a, b, c in zip(segment.box.offset[segment.dropped :], shared.offset, part_slice.offset, strict=True)
            )
            target = out[shared.within(part.offset)] if part.offset else out
            inside = TensorSlice((*leading, *start), (*(1 for _ in leading), *shared.length))
            # The target gets axes of length 1 for the leading indices, so that it has the rank of the foreign part.
            self._tensors.read(place.name, inside, target[(None,) * len(leading)])

    def model_files(self) -> dict[str, bytes]:
        """See `TensorSource`."""
        return dict(self._files)


def parameters_of(
    model: ModelConfig, *, value_head: bool = False
) -> tuple[dict[str, list[StoredSlice]], dict[str, tuple[int, ...]]]:
    """List the parameters of a plain transformers model: the stored slices that each consists of on disk, and its shape."""
    config = read_config(model)
    lm, layout, _ = empty_lm(config, model, torch.float32, media=media_config(model, config))
    root = HFModel(lm, head=ValueHead() if value_head else None)
    shapes = {hf_name(name).name: tuple(p.shape) for name, p in root.named_parameters()}
    return {
        name: [StoredSlice(name, shape, whole(shape))] if name.startswith(HEAD_PREFIX) else layout.stored_slices(name, shape)
        for name, shape in shapes.items()
    }, shapes


def load_pickle(path: Path, allowed: Callable[[str, str], Any], *, trust: bool) -> Any:
    """Read a pickle.

    Args:
        path: The path of the file.
        allowed: Returns the class for a module and a name, or None for a class that must not be instantiated.
        trust: Whether to allow everything, so that the file may run code.

    Raises:
        CheckpointError: The file needs a class that is not allowed, or cannot be read.
    """

    # The pure-Python unpickler is needed because the C one only allows overriding find_class, and a pickle may change
    # attributes of the classes that it gets.
    plain: Any = pickle._Unpickler  # type: ignore[attr-defined]

    class Restricted(plain):  # type: ignore[misc]
        dispatch: ClassVar[dict[int, Any]] = dict(plain.dispatch)

        # BUILD sets attributes of the object below the state on the stack. Of a class or function, this could replace
        # its methods.
        def load_build(self) -> None:
            if not trust and (isinstance(self.stack[-2], type) or callable(self.stack[-2])):
                raise CheckpointError(f"{path} tries to change {self.stack[-2]!r}, which could run code")
            super().load_build()

        dispatch[pickle.BUILD[0]] = load_build

        def find_class(self, module: str, name: str) -> Any:
            cls = allowed(module, name)
            if cls is None and not trust:
                raise CheckpointError(
                    f"{path} tries to load {module}.{name}, which could run code; if you trust its source, add --trust-pickle"
                )
            return super().find_class(module, name) if cls is None else cls

    try:
        with open(path, "rb") as file:
            return Restricted(file).load()
    except CheckpointError:
        raise
    except Exception as e:  # a damaged pickle can fail in any way
        raise CheckpointError(f"{path} cannot be read: {type(e).__name__} {e}") from e


def load_tensors(source: Any, where: str, *, trust: bool, mmap: bool = False) -> Any:
    """Load what torch.save wrote, with torch's own safe loading.

    Args:
        source: A path or an open file.
        where: The location of the file, for messages.
        trust: Whether to allow everything, so that the file may run code.
        mmap: Whether to leave tensors in the file until they are accessed.

    Raises:
        CheckpointError: The file contains more than tensors and plain data, or cannot be read.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=not trust, mmap=mmap)
    except pickle.UnpicklingError as e:
        first = str(e).partition("\n")[0]
        raise CheckpointError(
            f"{where} contains more than tensors and could run code ({first}); if you trust its source, add --trust-pickle"
        ) from e
    except Exception as e:  # a damaged pickle can fail in any way
        raise CheckpointError(f"{where} cannot be read: {type(e).__name__} {e}") from e


def copy_part(tensor: Tensor, part: TensorSlice, out: Any) -> None:
    """Copy a part of a tensor in memory into an array of raw numbers."""
    from ..engine.checkpoint.local_shards import raw

    out[...] = raw(tensor.detach()[part.within((0,) * tensor.dim())])

"""Folders of torch's distributed checkpoint (DCP): `.metadata` and `.distcp` files.

The metadata is a pickle; it is read with the classes of DCP alone. The tensors are what torch.save makes, read by torch's own
safe loading, a chunk at a time.
"""

import io
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.metadata as dcp_metadata
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ..engine.checkpoint.hf_folder import Entry
from ..engine.checkpoint.local_shards import DTYPES
from ..engine.checkpoint.safetensors_io import count, shape_of
from ..engine.checkpoint.tensor_slices import TensorSlice, intersect
from ..engine.errors import CheckpointError
from .foreign import copy_part, load_pickle, load_tensors

METADATA = ".metadata"
KEPT_CHUNKS = 4


class _Nothing:
    """In the place of what the metadata has beside the tensors' places: megatron's markers, the plan of the save."""

    def __init__(self, *_: object) -> None:
        pass


def _allowed(module: str, name: str) -> Any:
    if module == "torch":
        found = getattr(torch, name, None)
        return found if isinstance(found, torch.dtype) or found is torch.Size else None
    known: dict[tuple[str, str], Any] = {
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): filesystem._StoragePrefix,
        ("collections", "OrderedDict"): OrderedDict,
        ("builtins", "set"): set,
        ("pathlib", "PosixPath"): _Nothing,
        ("pathlib", "Path"): _Nothing,
    }
    if module == "torch.distributed.checkpoint.metadata":
        return getattr(dcp_metadata, name, None) if name in (*dcp_metadata.__all__, "_MEM_FORMAT_ENCODING") else None
    if module == "torch.distributed.checkpoint.planner" or (
        module.startswith("megatron.core.dist_checkpointing.") and name.startswith("MCore")
    ):
        return _Nothing
    return known.get((module, name))


class DCPTensors:
    """The tensors of a DCP folder.

    Args:
        folder: with `.metadata`.
        trust: read pickles that could run code.

    Raises:
        CheckpointError: the metadata cannot be read, or names files outside the folder.
    """

    def __init__(self, folder: Path, *, trust: bool = False) -> None:
        self.label, self._folder, self._trust = str(folder), folder, trust
        metadata = load_pickle(folder / METADATA, _allowed, trust=trust)
        try:
            self._tensors = {
                name: found for name, found in metadata.state_dict_metadata.items() if isinstance(found, TensorStorageMetadata)
            }
            self._places: dict[MetadataIndex, Any] = metadata.storage_data
            self.entries: dict[str, Entry] = {
                name: (DTYPES[found.properties.dtype], tuple(found.size)) for name, found in self._tensors.items()
            }
            self._check_places()
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"{folder / METADATA} is no metadata of a checkpoint: {type(e).__name__} {e}") from e
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], Tensor] = OrderedDict()

    def _check_places(self) -> None:
        """Refuse what leads out of the folder or beyond a file, and chunks that are no parts of their tensors."""
        for place in self._places.values():
            path = place.relative_path
            if type(path) is not str or os.path.basename(path) != path or not (self._folder / path).is_file():
                raise CheckpointError(f"{self._folder / METADATA} names {path!r}, which is no file in the folder")
            if count(place.offset) + count(place.length) > (self._folder / path).stat().st_size:
                raise CheckpointError(f"{self._folder}/{path} is shorter than {METADATA} says; it is cut off")
            if getattr(place, "transform_descriptors", None):
                raise CheckpointError(
                    f"{self._folder}: files that DCP transformed ({place.transform_descriptors}) are not read"
                )
        for name, found in self._tensors.items():
            shape = shape_of(found.size)
            for chunk in found.chunks:
                box = TensorSlice(shape_of(chunk.offsets), shape_of(chunk.sizes))
                if len(box.offset) != len(shape) or any(end > n for end, n in zip(box.end, shape, strict=True)):
                    raise ValueError(f"a chunk of {name} from {list(box.offset)}, {list(box.length)} long, of {list(shape)}")

    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """See `ForeignTensors`."""
        filled = 0
        for chunk in self._tensors[name].chunks:
            box = TensorSlice(tuple(chunk.offsets), tuple(chunk.sizes))
            shared = intersect(part, box)
            if shared is None:
                continue
            tensor = self._chunk(name, box)
            inside = shared.seen_from(box.offset)
            copy_part(tensor, inside, out[shared.within(part.offset)] if part.offset else out)
            filled += shared.volume
        if filled != part.volume:
            raise CheckpointError(f"{self.label} covers {filled} of the {part.volume} elements of a part of {name}")

    def _chunk(self, name: str, box: TensorSlice) -> Tensor:
        """A chunk as it was saved; the last few are kept, since its blocks are asked for one after the other."""
        index = MetadataIndex(name, torch.Size(box.offset))
        place = self._places.get(index)
        if place is None:
            raise CheckpointError(f"{self.label} does not say where {name} from {list(box.offset)} on lies")
        key = (place.relative_path, place.offset)
        with self._lock:
            if key not in self._kept:
                with open(self._folder / place.relative_path, "rb") as file:
                    file.seek(place.offset)
                    data = file.read(place.length)
                where = f"{self.label}/{place.relative_path}"
                tensor = load_tensors(io.BytesIO(data), where, trust=self._trust)
                if (
                    not isinstance(tensor, Tensor)
                    or tuple(tensor.shape) != box.length
                    or DTYPES.get(tensor.dtype) != self.entries[name][0]
                ):
                    raise CheckpointError(
                        f"{where}: the bytes from {place.offset} on are not the part of {name} that they should be"
                    )
                self._kept[key] = tensor
                while len(self._kept) > KEPT_CHUNKS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]

    def scalar(self, name: str) -> float | None:
        """A tensor of one number; None where there is none."""
        if name not in self.entries or any(n != 1 for n in self.entries[name][1]):
            return None
        shape = self.entries[name][1]
        return float(self._chunk(name, TensorSlice((0,) * len(shape), shape)).reshape(()))

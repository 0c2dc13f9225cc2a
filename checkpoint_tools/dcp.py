"""Folders of PyTorch Distributed Checkpoint (DCP): `.metadata` and `.distcp` files.

The metadata is a pickle; only the classes of DCP are loaded from it. The tensors were written by torch.save and are read one
chunk at a time by torch's own safe loading.
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
CACHED_CHUNKS = 4


class _Placeholder:
    """A placeholder for metadata other than the locations of tensors, such as Megatron's markers and the plan of the save."""

    def __init__(self, *_: object) -> None:
        pass


def _allowed(module: str, name: str) -> Any:
    if module == "torch":
        # Only data types and sizes: other attributes of torch are functions, some of which run code.
        value = getattr(torch, name, None)
        return value if isinstance(value, torch.dtype) or value is torch.Size else None
    classes: dict[tuple[str, str], Any] = {
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): filesystem._StoragePrefix,
        ("collections", "OrderedDict"): OrderedDict,
        ("builtins", "set"): set,
        ("pathlib", "PosixPath"): _Placeholder,
        ("pathlib", "Path"): _Placeholder,
    }
    if module == "torch.distributed.checkpoint.metadata":
        return getattr(dcp_metadata, name, None) if name in (*dcp_metadata.__all__, "_MEM_FORMAT_ENCODING") else None
    if module == "torch.distributed.checkpoint.planner" or (
        module.startswith("megatron.core.dist_checkpointing.") and name.startswith("MCore")
    ):
        return _Placeholder
    return classes.get((module, name))


class DCPTensors:
    """The tensors of a DCP folder.

    Args:
        folder: The folder that contains `.metadata`.
        trust: Whether to read pickles that could run code.

    Raises:
        CheckpointError: The metadata cannot be read, or names files outside the folder.
    """

    def __init__(self, folder: Path, *, trust: bool = False) -> None:
        self.label, self._folder, self._trust = str(folder), folder, trust
        metadata = load_pickle(folder / METADATA, _allowed, trust=trust)
        try:
            self._tensors = {
                name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
            }
            self._places: dict[MetadataIndex, Any] = metadata.storage_data
            self.entries: dict[str, Entry] = {
                name: (DTYPES[entry.properties.dtype], tuple(entry.size)) for name, entry in self._tensors.items()
            }
            self._check_places()
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"{folder / METADATA} is not the metadata of a checkpoint: {type(e).__name__} {e}") from e
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, int], Tensor] = OrderedDict()

    def _check_places(self) -> None:
        """Check that all data lies within the files of the folder, and all chunks within their tensors."""
        for place in self._places.values():
            path = place.relative_path
            # The metadata may come from elsewhere; it must not make this process read files outside the folder.
            if type(path) is not str or os.path.basename(path) != path or not (self._folder / path).is_file():
                raise CheckpointError(f"{self._folder / METADATA} names {path!r}, which is not a file in the folder")
            if count(place.offset) + count(place.length) > (self._folder / path).stat().st_size:
                raise CheckpointError(f"{self._folder}/{path} is shorter than {METADATA} records; it is truncated")
            # DCP can store compressed data; the lengths would then not be those of the tensors.
            if getattr(place, "transform_descriptors", None):
                raise CheckpointError(
                    f"{self._folder}: files that DCP transformed ({place.transform_descriptors}) cannot be read"
                )
        for name, entry in self._tensors.items():
            shape = shape_of(entry.size)
            for chunk in entry.chunks:
                chunk_slice = TensorSlice(shape_of(chunk.offsets), shape_of(chunk.sizes))
                if len(chunk_slice.offset) != len(shape) or any(
                    end > n for end, n in zip(chunk_slice.end, shape, strict=True)
                ):
                    raise ValueError(
                        f"a chunk of {name} at {list(chunk_slice.offset)} of length {list(chunk_slice.length)} exceeds the "
                        f"shape {list(shape)}"
                    )

    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """See `ForeignTensors`."""
        filled = 0
        for chunk in self._tensors[name].chunks:
            chunk_slice = TensorSlice(tuple(chunk.offsets), tuple(chunk.sizes))
            shared = intersect(part, chunk_slice)
            if shared is None:
                continue
            tensor = self._chunk(name, chunk_slice)
            # The part that is read and the chunk overlap in `shared`, whose position is needed relative to each of
            # them.
            inside = shared.seen_from(chunk_slice.offset)
            copy_part(tensor, inside, out[shared.within(part.offset)] if part.offset else out)
            filled += shared.volume
        # Chunks that leave a gap would leave whatever was in the reused buffer.
        if filled != part.volume:
            raise CheckpointError(f"{self.label} covers only {filled} of the {part.volume} elements of a part of {name}")

    def _chunk(self, name: str, chunk_slice: TensorSlice) -> Tensor:
        """Return a chunk as it was saved. The last few chunks are cached, because their blocks are read one after another."""
        index = MetadataIndex(name, torch.Size(chunk_slice.offset))
        place = self._places.get(index)
        if place is None:
            raise CheckpointError(
                f"{self.label} does not record where the chunk of {name} at {list(chunk_slice.offset)} is stored"
            )
        key = (place.relative_path, place.offset)
        # Held while the chunk is read, so that threads which need the same chunk do not all load it.
        with self._lock:
            if key not in self._cache:
                with open(self._folder / place.relative_path, "rb") as file:
                    file.seek(place.offset)
                    # A chunk is a complete archive of torch.save inside the file. It is cut out, because the archive's
                    # directory is searched at the end.
                    data = file.read(place.length)
                where = f"{self.label}/{place.relative_path}"
                tensor = load_tensors(io.BytesIO(data), where, trust=self._trust)
                if (
                    not isinstance(tensor, Tensor)
                    or tuple(tensor.shape) != chunk_slice.length
                    or DTYPES.get(tensor.dtype) != self.entries[name][0]
                ):
                    raise CheckpointError(f"{where}: the bytes at offset {place.offset} are not the expected part of {name}")
                self._cache[key] = tensor
                while len(self._cache) > CACHED_CHUNKS:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(key)
            return self._cache[key]

    def scalar(self, name: str) -> float | None:
        """Return the value of a tensor with a single element, or None if there is no such tensor."""
        if name not in self.entries or any(n != 1 for n in self.entries[name][1]):
            return None
        shape = self.entries[name][1]
        return float(self._chunk(name, TensorSlice((0,) * len(shape), shape)).reshape(()))

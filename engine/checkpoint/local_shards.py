"""Boxes of tensors in memory, and their numbers to and from files."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .safetensors_io import RAW, TensorFiles
from .tensor_slices import StoredSlice, TensorSlice

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {code: dtype for dtype, code in DTYPES.items()}
_SIGNED: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""What torch takes over from NumPy, by size."""
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalShard:
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
    def box(self) -> TensorSlice:
        """In the global tensor."""
        return TensorSlice(self.offset, tuple(self.data.shape))


def cut_local_shards(
    kind: str, segments: Iterable[StoredSlice], box: TensorSlice, data: Tensor, *, owned: bool = True
) -> Iterator[LocalShard]:
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
        yield LocalShard(kind=kind, name=segment.name, shape=segment.shape, offset=offset, data=view, owned=owned)


def raw(tensor: Tensor) -> Any:
    """A tensor of the host as an array of `RAW` numbers that shares its memory."""
    size = tensor.dtype.itemsize
    # Not `Tensor.numpy`: it forbids for good that the memory is given back, as it is where state rests on disk.
    return np.from_dlpack(tensor.detach().view(_SAME_SIZE[size])).view(RAW[size])


def as_tensor(array: Any, dtype: str) -> Tensor:
    """An array of `RAW` numbers as a tensor of the type that they are of, sharing its memory."""
    made: Tensor = torch.from_numpy(array.view(_SIGNED[array.itemsize]))
    return made.view(TORCH_DTYPES[dtype])


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous and on the host."""
    flat = raw(tensor.detach().cpu().contiguous().reshape(-1))
    return memoryview(flat).cast("B") if flat.size else memoryview(b"")


def read_part(files: TensorFiles, file: str, key: str, part: TensorSlice, target: Tensor) -> None:
    """Copy a part of a stored tensor into a tensor of the part's shape, of any number format and on any device."""
    stored = TORCH_DTYPES[files.array(file, key).dtype]
    with torch.no_grad():
        if target.device.type == "cpu" and target.dtype == stored:
            files.read(file, key, part, raw(target))
        else:
            there = torch.empty(part.length, dtype=stored)
            files.read(file, key, part, raw(there))
            target.copy_(there)

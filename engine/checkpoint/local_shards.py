"""Local shards: the tensor slices that a rank holds in memory, and how they are read from and written to files."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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
# NumPy has no bfloat16 and no 8-bit floats, so tensors are exchanged as integers of the same size.
_SIGNED: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""The NumPy types that torch accepts, by item size."""
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalShard:
    """A slice of a global tensor that this rank holds.

    Args:
        kind: The kind of tensor: value, exp_avg or exp_avg_sq.
        name: The tensor's Hugging Face name.
        shape: The tensor's global shape.
        offset: The start of the slice in the global tensor.
        data: A view into live memory; loading writes into it.
        owned: Whether this rank writes the slice when saving; otherwise another rank that holds the same slice does.
        transposed: Whether the last two axes of the tensor are exchanged in memory, where `data` is a view with those of the tensor.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor
    owned: bool = True
    transposed: bool = False

    @property
    def box(self) -> TensorSlice:
        """The slice's position in the global tensor."""
        return TensorSlice(self.offset, tuple(self.data.shape))

    def as_in_memory(self) -> "LocalShard":
        """Return the shard of a tensor whose axes have the order of those in memory."""
        shape, offset = ((*sizes[:-2], sizes[-1], sizes[-2]) for sizes in (self.shape, self.offset))
        return replace(self, shape=shape, offset=offset, data=self.data.transpose(-1, -2), transposed=False)


def cut_local_shards(
    kind: str, stored_slices: Iterable[StoredSlice], box: TensorSlice, data: Tensor, *, owned: bool = True
) -> Iterator[LocalShard]:
    """Yield the local shards that make up a slice of a parameter.

    Args:
        kind: The kind of tensor: value, exp_avg or exp_avg_sq.
        stored_slices: The stored slices that the parameter consists of.
        box: The slice of the parameter.
        data: The data of that slice, a view into live memory.
        owned: Whether this rank writes the shards when saving.
    """
    for stored in stored_slices:
        match = stored.part(box)
        if match is None:
            continue
        shared, offset = match
        view = data[shared.within(box.offset)] if box.offset else data
        # Give the view the axes of the tensor on disk: without those that only the parameter has, in the order on
        # disk, and with axes of length 1 for those that only the tensor on disk has.
        for _ in range(stored.dropped):
            view = view.select(0, 0)
        view = view.transpose(-1, -2) if stored.transposed else view
        view = view[(None,) * len(stored.index)] if stored.index else view
        yield LocalShard(
            kind=kind,
            name=stored.name,
            shape=stored.shape,
            offset=offset,
            data=view,
            owned=owned,
            transposed=stored.transposed,
        )


def raw(tensor: Tensor) -> Any:
    """Return a CPU tensor as an array of `RAW` numbers that shares its memory."""
    size = tensor.dtype.itemsize
    # Not `Tensor.numpy`: it permanently prevents the memory from being freed, which offloading state to disk requires.
    return np.from_dlpack(tensor.detach().view(_SAME_SIZE[size])).view(RAW[size])


def as_tensor(array: Any, dtype: str) -> Tensor:
    """Return an array of `RAW` numbers as a tensor of the given dtype that shares its memory."""
    tensor: Tensor = torch.from_numpy(array.view(_SIGNED[array.itemsize]))
    return tensor.view(TORCH_DTYPES[dtype])


def host_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    flat = raw(tensor.detach().cpu().contiguous().reshape(-1))
    # `cast` raises an error for an array without elements.
    return memoryview(flat).cast("B") if flat.size else memoryview(b"")


def read_part(files: TensorFiles, file: str, key: str, part: TensorSlice, target: Tensor) -> None:
    """Copy a slice of a stored tensor into a tensor of the same shape, of any dtype and on any device."""
    stored_dtype = TORCH_DTYPES[files.array(file, key).dtype]
    # The target may be a parameter, which autograd does not allow to be changed in place.
    with torch.no_grad():
        if target.device.type == "cpu" and target.dtype == stored_dtype:
            files.read(file, key, part, raw(target))
        else:
            # Through host memory: the target is on a device, or of another dtype than the file.
            staging = torch.empty(part.length, dtype=stored_dtype)
            files.read(file, key, part, raw(staging))
            target.copy_(staging)

"""safetensors files: the header, a streaming writer, digests by chunks, parts read and checked. Imports no torch.

Digests are xxh3-64 of consecutive chunks of a file, so that a part of it can be checked without reading the rest.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import xxhash

from ..errors import CheckpointError
from .storage import Store
from .tensor_slices import TensorSlice

CHUNK_BYTES = 2**22
BLOCK_BYTES = 2**24
HEADER_LIMIT = 100_000_000
ITEMSIZE = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element, by safetensors' name of its type."""

RAW: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Numbers of a type's size: to copy elements their meaning is not needed."""


class DamagedError(CheckpointError):
    """Bytes of a checkpoint are not those that were written."""


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a tensor."""
    return ITEMSIZE[dtype] * math.prod(shape)


def layout(
    entries: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """A file of tensors one after the other.

    Args:
        entries: key -> (dtype, shape).
        metadata: strings for the header.

    Returns:
        the file's first bytes; where each tensor begins; the size of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at, starts = 0, {}
    for key, (dtype, shape) in entries.items():
        end = at + tensor_bytes(dtype, shape)
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        starts[key], at = at, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = len(text).to_bytes(8, "little") + text
    return first, {key: len(first) + start for key, start in starts.items()}, len(first) + at


class Digests:
    """xxh3-64 of a stream, chunk by chunk."""

    def __init__(self) -> None:
        self._open, self._filled = xxhash.xxh3_64(), 0
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        """Append bytes."""
        while len(data):
            part = data[: CHUNK_BYTES - self._filled]
            self._open.update(part)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == CHUNK_BYTES:
                self._done.append(self._open.hexdigest())
                self._open, self._filled = xxhash.xxh3_64(), 0

    def finish(self) -> list[str]:
        """Of all chunks, the last one being what is left."""
        return [*self._done, self._open.hexdigest()] if self._filled else list(self._done)


def digests_of(data: bytes) -> list[str]:
    """Of a small file."""
    found = Digests()
    found.update(memoryview(data))
    return found.finish()


class TensorWriter:
    """Writes a file whose header is known before its data, as a stream. No second copy of the data is made.

    Args:
        file: to write, from its beginning.
        entries: key -> (dtype, shape), in the order in which `write` will be called.
    """

    def __init__(self, file: BinaryIO, entries: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        first, _, self.size = layout(entries)
        self._file, self._digests = file, Digests()
        self._left = {key: size for key, entry in entries.items() if (size := tensor_bytes(*entry))}
        self._put(memoryview(first))

    def write(self, key: str, data: memoryview) -> None:
        """Append a tensor's bytes, all of them or the next ones."""
        if not len(data):
            return
        expected = next(iter(self._left), None)
        assert key == expected, (key, expected)
        assert len(data) <= self._left[key], key
        self._left[key] -= len(data)
        if not self._left[key]:
            del self._left[key]
        for start in range(0, len(data), BLOCK_BYTES):
            self._put(data[start : start + BLOCK_BYTES])

    def finish(self) -> dict[str, Any]:
        """The file's entry in a manifest."""
        assert not self._left, f"{next(iter(self._left))} was not written"
        return {"bytes": self.size, "xxh3": self._digests.finish()}

    def _put(self, data: memoryview) -> None:
        self._file.write(data)
        self._digests.update(data)


@dataclass(frozen=True)
class StoredArray:
    """A tensor in a file.

    Args:
        dtype: safetensors' name of its type.
        shape: of it.
        start: its first byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int


class CheckedFile:
    """Reads parts of a file, checking each chunk that it meets, once.

    Args:
        store: the folder.
        name: of the file.
        size: in bytes.
        digests: of its chunks; None reads without checking.
    """

    def __init__(self, store: Store, name: str, size: int, digests: Sequence[str] | None) -> None:
        self.store, self.name, self.size, self._digests = store, name, size, digests
        # Shared by threads: that two of them check the same chunk is a waste, and no harm.
        self._good: set[int] = set()

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on.

        Raises:
            DamagedError: they are not those that were written.
            CheckpointError: the file is shorter.
        """
        if self._digests is None:
            self.store.read_into(self.name, start, out)
            return
        end = start + len(out)
        first, last = -(-start // CHUNK_BYTES), end // CHUNK_BYTES if end < self.size else -(-end // CHUNK_BYTES)
        if first >= last:
            self._edge(start, out)
            return
        middle, stop = first * CHUNK_BYTES, min(last * CHUNK_BYTES, self.size)
        self._edge(start, out[: middle - start])
        for at in range(middle, stop, 4 * BLOCK_BYTES):
            block = out[at - start : min(at + 4 * BLOCK_BYTES, stop) - start]
            self.store.read_into(self.name, at, block)
            for offset in range(0, len(block), CHUNK_BYTES):
                self._check((at + offset) // CHUNK_BYTES, block[offset : offset + CHUNK_BYTES])
        self._edge(stop, out[stop - start :])

    def _edge(self, start: int, out: memoryview) -> None:
        """Bytes of parts of chunks: those not yet checked are read whole."""
        while len(out):
            number = start // CHUNK_BYTES
            begin, end = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, self.size)
            count = min(end - start, len(out))
            if number in self._good:
                self.store.read_into(self.name, start, out[:count])
            else:
                chunk = memoryview(bytearray(end - begin))
                self.store.read_into(self.name, begin, chunk)
                self._check(number, chunk)
                out[:count] = chunk[start - begin : start - begin + count]
            start, out = start + count, out[count:]

    def _check(self, number: int, data: memoryview) -> None:
        assert self._digests is not None
        if number in self._good:
            return
        if xxhash.xxh3_64_hexdigest(data) != self._digests[number]:
            raise DamagedError(
                f"{self.store}/{self.name}: the bytes from {number * CHUNK_BYTES} on do not match their checksum; the file is damaged"
            )
        self._good.add(number)


class TensorFiles:
    """Reads parts of the tensors in a folder's safetensors files. Threads may share one.

    Args:
        store: the folder.
        digests: by file; a file that has none is read without checking.
    """

    def __init__(self, store: Store, digests: Mapping[str, Sequence[str]] | None = None) -> None:
        self.store, self._digests = store, digests or {}
        self._files: dict[str, tuple[CheckedFile, dict[str, StoredArray]]] = {}

    def arrays(self, file: str) -> dict[str, StoredArray]:
        """The tensors of a file, by key.

        Raises:
            CheckpointError: no such file, or no safetensors file.
        """
        return self._open(file)[1]

    def array(self, file: str, key: str) -> StoredArray:
        """A tensor of a file.

        Raises:
            CheckpointError: there is none of that name.
        """
        found = self.arrays(file).get(key)
        if found is None:
            raise CheckpointError(f"{self.store}/{file} has no tensor {key!r}")
        return found

    def read(self, file: str, key: str, part: TensorSlice, out: Any) -> None:
        """Copy a part of a tensor, without reading much more than it.

        Args:
            file: its name.
            key: the tensor's.
            part: of the tensor.
            out: an array of `RAW` numbers with the part's shape, of any strides.
        """
        checked, arrays = self._open(file)
        array = arrays[key]
        assert out.shape == part.length, (out.shape, part)
        if not out.size:
            return
        row_bytes = tensor_bytes(array.dtype, array.shape[1:])
        first, rows = (part.offset[0], part.length[0]) if array.shape else (0, 1)
        whole_rows = part.length[1:] == array.shape[1:]
        if whole_rows and out.flags.c_contiguous:
            checked.read_into(array.start + first * row_bytes, _flat(out))
            return
        step = max(1, BLOCK_BYTES // row_bytes)
        block = np.empty((min(step, rows), *array.shape[1:]), out.dtype)
        inside = tuple(slice(o, o + n) for o, n in zip(part.offset[1:], part.length[1:], strict=True))
        for done in range(0, rows, step):
            some = block[: min(step, rows - done)]
            checked.read_into(array.start + (first + done) * row_bytes, _flat(some))
            out[done : done + len(some)] = some[(slice(None), *inside)]

    def _open(self, file: str) -> tuple[CheckedFile, dict[str, StoredArray]]:
        found = self._files.get(file)
        if found is None:
            size = self.store.size(file)
            if size is None:
                raise CheckpointError(f"{self.store}/{file} is missing")
            checked = CheckedFile(self.store, file, size, self._digests.get(file))
            found = self._files[file] = (checked, read_header(checked))
        return found


def _flat(array: Any) -> memoryview:
    """The bytes of a contiguous array, to write into."""
    return memoryview(array.reshape(-1)).cast("B")


def read_metadata(file: CheckedFile) -> dict[str, Any]:
    """The strings in a safetensors file's header.

    Raises:
        CheckpointError: it is no safetensors file.
    """
    found = _header(file)[0].get("__metadata__")
    return found if isinstance(found, dict) else {}


def read_header(file: CheckedFile) -> dict[str, StoredArray]:
    """The tensors of a safetensors file. Every number is checked before anything is made of its size.

    Raises:
        CheckpointError: it is none, or its tensors reach beyond it.
    """
    header, length = _header(file)
    try:
        return {k: _array(entry, 8 + length, file.size) for k, entry in header.items() if k != "__metadata__"}
    except (ValueError, TypeError, AttributeError, KeyError) as e:
        where = f"{file.store}/{file.name}"
        raise CheckpointError(f"{where} has a header that cannot be read: {type(e).__name__} {e}") from e


def _header(file: CheckedFile) -> tuple[dict[str, Any], int]:
    """A file's header, parsed, and its length."""
    where = f"{file.store}/{file.name}"
    first = bytearray(8)
    if file.size < 8:
        raise CheckpointError(f"{where} is no safetensors file: it has {file.size} bytes")
    file.read_into(0, memoryview(first))
    length = int.from_bytes(first, "little")
    if length > min(file.size - 8, HEADER_LIMIT):
        raise CheckpointError(f"{where} is no safetensors file, or cut off: a header of {length} bytes in {file.size}")
    text = bytearray(length)
    file.read_into(8, memoryview(text))
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{where} has a header that cannot be read: {type(e).__name__} {e}") from e
    if not isinstance(header, dict):
        raise CheckpointError(f"{where} has a header that cannot be read: it is a {type(header).__name__}")
    return header, length


def _array(entry: Mapping[str, Any], base: int, size: int) -> StoredArray:
    start, end = (count(n) for n in entry["data_offsets"])
    shape = shape_of(entry["shape"])
    expected = tensor_bytes(entry["dtype"], shape)
    if end - start != expected or base + end > size:
        raise ValueError(
            f"{entry['dtype']} {list(shape)} takes {expected} bytes, not those from {start} to {end} of {size - base}"
        )
    return StoredArray(entry["dtype"], shape, base + start)


def shape_of(numbers: Any) -> tuple[int, ...]:
    """Lengths of axes, of an untrusted file: no more elements than there can be, even where one axis is empty.

    Raises:
        ValueError: they are none.
    """
    found = tuple(map(count, numbers))
    if math.prod(n for n in found if n) >= 2**60:
        raise ValueError(f"{list(found)} is no shape that a tensor can have")
    return found


def count(n: Any) -> int:
    """A number of things, of an untrusted file.

    Raises:
        ValueError: it is none.
    """
    if type(n) is not int or n < 0:
        raise ValueError(f"{n!r} is no count")
    return n

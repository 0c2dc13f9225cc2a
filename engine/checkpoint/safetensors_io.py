"""safetensors files: the header, a streaming writer, digests per chunk, and verified reads of parts.

Digests are xxh3-64 of consecutive chunks of a file, so that a part of it can be verified without reading the rest.
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

# Reading a part of a file verifies whole chunks. Larger chunks mean more bytes that are read only for that; smaller
# ones mean more digests in the manifest.
CHUNK_BYTES = 2**22
BLOCK_BYTES = 2**24
# The limit of the safetensors library itself.
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
"""Bytes per element, by safetensors dtype name."""

RAW: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""NumPy types by item size: elements can be copied without knowing their meaning."""


class DamagedError(CheckpointError):
    """The bytes of a checkpoint are not those that were written."""


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bytes."""
    return ITEMSIZE[dtype] * math.prod(shape)


def layout(
    entries: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """Lay out a file with tensors one after the other.

    Args:
        entries: The tensors: key -> (dtype, shape).
        metadata: The strings for the header.

    Returns:
        The file's first bytes, the start of each tensor, and the size of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at, starts = 0, {}
    for key, (dtype, shape) in entries.items():
        end = at + tensor_bytes(dtype, shape)
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        starts[key], at = at, end
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format pads the header with spaces, so that the data start at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    first = len(text).to_bytes(8, "little") + text
    return first, {key: len(first) + start for key, start in starts.items()}, len(first) + at


class Digests:
    """The xxh3-64 digests of a stream, chunk by chunk."""

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
        """Return the digests of all chunks; the last chunk is the remainder."""
        return [*self._done, self._open.hexdigest()] if self._filled else list(self._done)


def digests_of(data: bytes) -> list[str]:
    """Return the digests of a small file."""
    digests = Digests()
    digests.update(memoryview(data))
    return digests.finish()


class TensorWriter:
    """Writes a file whose header is known in advance as a stream, without copying the data.

    Args:
        file: The file to write, from its beginning.
        entries: The tensors: key -> (dtype, shape), in the order of the calls to `write`.
    """

    def __init__(self, file: BinaryIO, entries: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        first, _, self.size = layout(entries)
        self._file, self._digests = file, Digests()
        # Tensors without elements have no bytes to wait for.
        self._remaining = {key: size for key, entry in entries.items() if (size := tensor_bytes(*entry))}
        self._put(memoryview(first))

    def write(self, key: str, data: memoryview) -> None:
        """Append a tensor's bytes: either all or the next part."""
        if not len(data):
            return
        expected = next(iter(self._remaining), None)
        assert key == expected, (key, expected)
        assert len(data) <= self._remaining[key], key
        self._remaining[key] -= len(data)
        if not self._remaining[key]:
            del self._remaining[key]
        for start in range(0, len(data), BLOCK_BYTES):
            self._put(data[start : start + BLOCK_BYTES])

    def finish(self) -> dict[str, Any]:
        """Return the file's entry in a manifest."""
        assert not self._remaining, f"{next(iter(self._remaining))} was not written"
        return {"bytes": self.size, "xxh3": self._digests.finish()}

    def _put(self, data: memoryview) -> None:
        self._file.write(data)
        self._digests.update(data)


@dataclass(frozen=True)
class StoredArray:
    """A tensor in a file.

    Args:
        dtype: The safetensors dtype name.
        shape: The shape of the tensor.
        start: The position of its first byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int


class CheckedFile:
    """Reads parts of a file and verifies each chunk that it reads, once.

    Args:
        store: The folder of the file.
        name: The name of the file.
        size: The size of the file in bytes.
        digests: The digests of its chunks; None reads without verification.
    """

    def __init__(self, store: Store, name: str, size: int, digests: Sequence[str] | None) -> None:
        self.store, self.name, self.size, self._digests = store, name, size, digests
        # Shared by threads: two of them verifying the same chunk is wasteful but harmless.
        self._good: set[int] = set()

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes starting at `start`.

        Raises:
            DamagedError: The bytes are not those that were written.
            CheckpointError: The file is too short.
        """
        if self._digests is None:
            self.store.read_into(self.name, start, out)
            return
        end = start + len(out)
        # The chunks that lie completely in the range. The last one of the file may be short, and is complete if the
        # range reaches the end.
        first, last = -(-start // CHUNK_BYTES), end // CHUNK_BYTES if end < self.size else -(-end // CHUNK_BYTES)
        if first >= last:
            self._edge(start, out)
            return
        middle, stop = first * CHUNK_BYTES, min(last * CHUNK_BYTES, self.size)
        self._edge(start, out[: middle - start])
        # These are read directly into `out` and verified there, without a copy.
        for at in range(middle, stop, 4 * BLOCK_BYTES):
            block = out[at - start : min(at + 4 * BLOCK_BYTES, stop) - start]
            self.store.read_into(self.name, at, block)
            for offset in range(0, len(block), CHUNK_BYTES):
                self._check((at + offset) // CHUNK_BYTES, block[offset : offset + CHUNK_BYTES])
        self._edge(stop, out[stop - start :])

    def _edge(self, start: int, out: memoryview) -> None:
        """Read bytes that cover chunks partially; chunks that are not verified yet are read in full."""
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
                f"{self.store}/{self.name}: the bytes starting at {number * CHUNK_BYTES} do not match their checksum; "
                "the file is damaged"
            )
        self._good.add(number)


class TensorFiles:
    """Reads parts of the tensors in a folder's safetensors files. Threads may share an instance.

    Args:
        store: The folder of the files.
        digests: The digests by file; a file without digests is read without verification.
    """

    def __init__(self, store: Store, digests: Mapping[str, Sequence[str]] | None = None) -> None:
        self.store, self._digests = store, digests or {}
        self._files: dict[str, tuple[CheckedFile, dict[str, StoredArray]]] = {}

    def arrays(self, file: str) -> dict[str, StoredArray]:
        """Return the tensors of a file, by key.

        Raises:
            CheckpointError: The file does not exist or is not a safetensors file.
        """
        return self._open(file)[1]

    def array(self, file: str, key: str) -> StoredArray:
        """Return a tensor of a file.

        Raises:
            CheckpointError: There is no tensor with that key.
        """
        stored = self.arrays(file).get(key)
        if stored is None:
            raise CheckpointError(f"{self.store}/{file} has no tensor {key!r}")
        return stored

    def read(self, file: str, key: str, part: TensorSlice, out: Any) -> None:
        """Copy a slice of a tensor, without reading much more than the slice.

        Args:
            file: The name of the file.
            key: The key of the tensor.
            part: The slice of the tensor.
            out: An array of `RAW` numbers with the slice's shape and any strides.
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
        # Otherwise whole rows are read in blocks, and the part inside is copied out, instead of a small read per row.
        step = max(1, BLOCK_BYTES // row_bytes)
        block = np.empty((min(step, rows), *array.shape[1:]), out.dtype)
        inside = tuple(slice(o, o + n) for o, n in zip(part.offset[1:], part.length[1:], strict=True))
        for done in range(0, rows, step):
            piece = block[: min(step, rows - done)]
            checked.read_into(array.start + (first + done) * row_bytes, _flat(piece))
            out[done : done + len(piece)] = piece[(slice(None), *inside)]

    def _open(self, file: str) -> tuple[CheckedFile, dict[str, StoredArray]]:
        # Two threads may open a file at the same time; both read the same header, and one result is kept.
        entry = self._files.get(file)
        if entry is None:
            size = self.store.size(file)
            if size is None:
                raise CheckpointError(f"{self.store}/{file} is missing")
            checked = CheckedFile(self.store, file, size, self._digests.get(file))
            entry = self._files[file] = (checked, read_header(checked))
        return entry


def _flat(array: Any) -> memoryview:
    """Return the bytes of a contiguous array, for writing into it."""
    return memoryview(array.reshape(-1)).cast("B")


def read_metadata(file: CheckedFile) -> dict[str, Any]:
    """Return the metadata strings in a safetensors file's header.

    Raises:
        CheckpointError: It is not a safetensors file.
    """
    metadata = _header(file)[0].get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def read_header(file: CheckedFile) -> dict[str, StoredArray]:
    """Return the tensors of a safetensors file. Every number is checked before anything of its size is allocated.

    Raises:
        CheckpointError: It is not a safetensors file, or its tensors extend beyond the end of the file.
    """
    header, length = _header(file)
    try:
        return {k: _array(entry, 8 + length, file.size) for k, entry in header.items() if k != "__metadata__"}
    except (ValueError, TypeError, AttributeError, KeyError) as e:
        where = f"{file.store}/{file.name}"
        raise CheckpointError(f"{where} has a header that cannot be read: {type(e).__name__} {e}") from e


def _header(file: CheckedFile) -> tuple[dict[str, Any], int]:
    """Return a file's parsed header and its length."""
    where = f"{file.store}/{file.name}"
    first = bytearray(8)
    if file.size < 8:
        raise CheckpointError(f"{where} is not a safetensors file: it has {file.size} bytes")
    file.read_into(0, memoryview(first))
    length = int.from_bytes(first, "little")
    if length > min(file.size - 8, HEADER_LIMIT):
        raise CheckpointError(f"{where} is not a safetensors file, or is truncated: a header of {length} bytes in {file.size}")
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
            f"{entry['dtype']} {list(shape)} takes {expected} bytes, but its offsets are {start} to {end} of {size - base}"
        )
    return StoredArray(entry["dtype"], shape, base + start)


def shape_of(numbers: Any) -> tuple[int, ...]:
    """Return a shape from an untrusted file, limited to a possible number of elements even if an axis is empty.

    Raises:
        ValueError: The numbers are not a valid shape.
    """
    shape = tuple(map(count, numbers))
    if math.prod(n for n in shape if n) >= 2**60:
        raise ValueError(f"{list(shape)} is not a shape that a tensor can have")
    return shape


def count(n: Any) -> int:
    """Return a count from an untrusted file.

    Raises:
        ValueError: It is not a count.
    """
    if type(n) is not int or n < 0:
        raise ValueError(f"{n!r} is not a count")
    return n

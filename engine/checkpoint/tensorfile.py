"""safetensors files: written as a stream with checksums, read slice by slice."""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {code: dtype for dtype, code in DTYPES.items()}
WRITE_BYTES = 2**24


class TensorWriter:
    """Writes one safetensors file whose header is known before its data. No second copy of the data is made.

    Args:
        path: of the file.
        entries: key -> (dtype, shape), in the order in which `write` will be called.
        metadata: strings for the header.
    """

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
        at = 0
        for key, (dtype, shape) in entries.items():
            size = dtype.itemsize
            for n in shape:
                size *= n
            header[key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._expected = iter(entries.items())
        self._file = open(path, "wb", buffering=0)  # closed by __exit__
        self._put(struct.pack("<Q", len(text)) + text)
        self.size = 8 + len(text) + at

    def write(self, key: str, tensor: Tensor) -> str:
        """Append a tensor; returns the xxh3-64 of its bytes."""
        name, (dtype, shape) = next(self._expected)
        assert (key, tensor.dtype, tuple(tensor.shape)) == (name, dtype, tuple(shape)), (key, name)
        digest = xxhash.xxh3_64()
        data = tensor_bytes(tensor)
        for start in range(0, len(data), WRITE_BYTES):
            chunk = data[start : start + WRITE_BYTES]
            digest.update(chunk)
            self._put(chunk)
        return digest.hexdigest()

    def _put(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            written = self._file.write(view)
            view = view[written:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                assert next(self._expected, None) is None, "a tensor of the header was not written"
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous and on the host."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(raw)


def checksum(tensor: Tensor) -> str:
    """xxh3-64 of a tensor's bytes."""
    return xxhash.xxh3_64(tensor_bytes(tensor)).hexdigest()


def file_checksum(path: Path) -> str:
    """xxh3-64 of a small file."""
    return xxhash.xxh3_64(path.read_bytes()).hexdigest()


class TensorFolder:
    """Reads slices of the safetensors files of one folder; each file is opened once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}

    def shape(self, file: str, key: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._slice(file, key).get_shape())

    def keys(self, file: str) -> list[str]:
        """Names in a file."""
        return list(self._handle(file).keys())

    def read(self, file: str, key: str, part: Sequence[slice]) -> Tensor:
        """A slice of a tensor; only its bytes are read."""
        if not part:
            result: Tensor = self._handle(file).get_tensor(key)
            return result
        result = self._slice(file, key)[tuple(part)]
        return result

    def _slice(self, file: str, key: str) -> Any:
        try:
            return self._handle(file).get_slice(key)
        except SafetensorError as e:
            raise CheckpointError(f"{self.folder / file} has no tensor {key!r}: {e}") from e

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(self.folder / file), "pt")
            except (SafetensorError, OSError) as e:
                raise CheckpointError(f"{self.folder / file} cannot be read: {e}") from e
        return self._open[file]


def fsync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write and fsync a JSON file."""
    with open(path, "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())

"""The manifest of a checkpoint, read as an untrusted file.

docs/checkpoint-format.md is its specification.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from ..errors import CheckpointError
from .safetensors_io import CHUNK_BYTES, ITEMSIZE, DamagedError, TensorFiles, count, digests_of, shape_of
from .storage import MANIFEST, MODEL_FOLDER, Store
from .tensor_slices import TensorSlice, covers

FORMAT = 1
CHECKSUM = "manifest.xxh3"
# A manifest is read into memory as a whole, so one from elsewhere needs a bound.
MANIFEST_LIMIT = 2**31
MODEL = f"{MODEL_FOLDER}/"
TEMPLATES = "additional_chat_templates"
"""The only folder inside `model/`, for a tokenizer with several chat templates."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")
"""Suffixes of files that hold weights or an index of weights."""


@dataclass(frozen=True)
class StoredFileSlice:
    """A slice of a tensor in a file.

    Args:
        box: The slice's position in the global tensor.
        file: The name of the file in the folder.
        key: The name of the slice in the file.
    """

    box: TensorSlice
    file: str
    key: str


@dataclass(frozen=True)
class StoredTensor:
    """All slices of one kind (value, exp_avg, exp_avg_sq) of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredFileSlice, ...]


class CheckpointManifest:
    """The contents of a checkpoint.

    Args:
        data: The parsed JSON.
        store: The checkpoint's folder.
    """

    def __init__(self, data: Mapping[str, Any], store: Store) -> None:
        self.data, self.store = data, store

    @classmethod
    def read(cls, store: Store) -> "CheckpointManifest":
        """Read and check a folder's manifest, without reading tensors.

        Raises:
            DamagedError: The manifest is missing or does not match its checksum, or a file is missing or has another size.
            CheckpointError: The format is unknown, the manifest is malformed, or a path leaves the folder.
        """
        where = f"{store}/{MANIFEST}"
        size = store.size(MANIFEST)
        if size is None:
            raise DamagedError(f"{store} is not a complete checkpoint: it has no {MANIFEST}")
        if size > MANIFEST_LIMIT:
            raise CheckpointError(f"{where} has {size} bytes, too many for a manifest")
        text = store.read(MANIFEST)
        checksum = store.read(CHECKSUM) if store.size(CHECKSUM) == 16 else b""
        if not checksum:
            raise DamagedError(f"{store} is not a complete checkpoint: it has no {CHECKSUM}")
        if checksum != _checksum(text):
            raise DamagedError(f"{where} does not match {CHECKSUM}: the checkpoint is damaged")
        try:
            data = json.loads(text)
        # `json.loads` raises a RecursionError for deeply nested input.
        except (ValueError, RecursionError) as e:
            raise CheckpointError(f"{where} cannot be read: {e}") from e
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            version = data.get("format") if isinstance(data, dict) else None
            raise CheckpointError(f"{where} has format {version!r}; this version reads format {FORMAT}")
        try:
            manifest = cls(data, store)
            manifest._check()
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise CheckpointError(f"{where} is malformed: {type(e).__name__} {e}") from e
        return manifest

    def _check(self) -> None:
        data = self.data
        count(data["step"])
        if count(data["world_size"]) != len(data["ranks"]):
            raise ValueError(f"world_size is {data['world_size']}, but there is state for {len(data['ranks'])} ranks")
        for key, kind in (("parallel", dict), ("engine", dict), ("model", dict), ("extra", dict), ("backend", str)):
            if not isinstance(data[key], kind):
                raise ValueError(f"{key} is {type(data[key]).__name__}")
        count(data["schedule"]["step"])
        if data["optim"] is not None and not isinstance(data["optim"]["name"], str):
            raise ValueError("optim has no name")
        if not isinstance(data["engine"]["precision"]["params"], str):
            raise ValueError("engine.precision.params is not the name of a dtype")
        for name, number in ((data["optimizer"] or {}).get("step") or {}).items():
            # Optimizers keep counts as floats; up to 2^53 a float64 represents every integer.
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 2**53:
                raise ValueError(f"{name} has an invalid update count: {number!r}")
        for name, entry in data["files"].items():
            self._check_file(name, entry)
        for name in data["tensors"]:
            self.kinds(name)

    def _check_file(self, name: str, entry: Mapping[str, Any]) -> None:
        # A manifest may come from elsewhere: names must not lead outside the folder.
        parts = name.removeprefix(MODEL).split("/")
        is_template = name.startswith(f"{MODEL}{TEMPLATES}/") and len(parts) == 2
        if (len(parts) > 1 and not is_template) or any(p in ("", ".", "..") or "\\" in p or "\0" in p for p in parts):
            raise CheckpointError(
                f"{self.store}/{MANIFEST} lists the file {name!r}, which is not a plain name inside the folder"
            )
        expected, actual = count(entry["bytes"]), self.store.size(name)
        if actual != expected:
            actual_text = "missing" if actual is None else f"{actual} bytes"
            raise DamagedError(
                f"{self.store}/{name} is {actual_text}; the manifest says {expected} bytes: the checkpoint is damaged"
            )
        if len(entry["xxh3"]) != -(-expected // CHUNK_BYTES) or not all(isinstance(d, str) for d in entry["xxh3"]):
            raise ValueError(f"{name} has {len(entry['xxh3'])} checksums for {expected} bytes")

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        step: int = self.data["step"]
        return step

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self.data["tensors"])

    def kinds(self, name: str) -> dict[str, StoredTensor]:
        """Return the stored kinds of one tensor."""
        entry = self.data["tensors"][name]
        shape = shape_of(entry["shape"])
        tensors = {}
        for kind, stored in entry["kinds"].items():
            if stored["dtype"] not in ITEMSIZE:
                raise ValueError(f"{kind} of {name} has the unknown dtype {stored['dtype']!r}")
            tensors[kind] = StoredTensor(shape, stored["dtype"], tuple(self._stored_slice(b, shape) for b in stored["boxes"]))
        return tensors

    def _stored_slice(self, b: Mapping[str, Any], shape: tuple[int, ...]) -> StoredFileSlice:
        if b["file"] not in self.data["files"]:
            raise CheckpointError(f"{self.store}/{MANIFEST} uses the file {b['file']!r}, which it does not list")
        tensor_slice = TensorSlice(shape_of(b["offset"]), shape_of(b["length"]))
        if len(tensor_slice.offset) != len(shape) or any(end > n for end, n in zip(tensor_slice.end, shape, strict=True)):
            raise ValueError(
                f"a slice of length {list(tensor_slice.length)} at {list(tensor_slice.offset)} does not fit into the "
                f"tensor's shape {list(shape)}"
            )
        return StoredFileSlice(tensor_slice, b["file"], b["key"])

    def tensor_files(self, *, verify: bool = True) -> TensorFiles:
        """Return a reader of the checkpoint's tensors.

        Args:
            verify: Whether to verify checksums when reading.
        """
        return TensorFiles(self.store, {n: e["xxh3"] for n, e in self.data["files"].items()} if verify else None)

    def check_cover(self, files: TensorFiles, name: str, kind: str) -> StoredTensor:
        """Return a tensor after checking that its slices cover it exactly once and match their files.

        Raises:
            CheckpointError: There is a gap or an overlap, or a slice differs from its file.
        """
        tensor = self.kinds(name)[kind]
        # First check that each slice exists: slices without data cost a writer nothing to declare, but cost a reader time.
        for stored in tensor.boxes:
            self.check_slice(files, stored, tensor.dtype)
        if not covers(tensor.shape, [b.box for b in tensor.boxes]):
            raise CheckpointError(
                f"{self.store}: the slices of {kind} of {name} do not cover {list(tensor.shape)} exactly once"
            )
        return tensor

    def check_slice(self, files: TensorFiles, box: StoredFileSlice, dtype: str) -> None:
        """Check that a slice matches its file.

        Raises:
            CheckpointError: The dtype or the shape differs.
        """
        array = files.array(box.file, box.key)
        if (array.dtype, array.shape) != (dtype, box.box.length):
            raise CheckpointError(
                f"{self.store}/{box.file} has {array.dtype} {list(array.shape)} under {box.key!r}, but the manifest says "
                f"{dtype} {list(box.box.length)}"
            )

    def model_files(self) -> Iterator[tuple[str, bytes]]:
        """Yield the names and contents of the config, tokenizer and similar files, after checking them.

        Raises:
            DamagedError: A file does not match its checksum.
        """
        for name, entry in self.data["files"].items():
            if name.startswith(MODEL):
                plain = name.removeprefix(MODEL)
                if plain.startswith(".") or plain.endswith(WEIGHTS):
                    raise CheckpointError(f"{self.store}/{name} is not a file that belongs next to a model's weights")
                data = self.store.read(name)
                if digests_of(data) != entry["xxh3"]:
                    raise DamagedError(f"{self.store}/{name} does not match its checksum: the checkpoint is damaged")
                yield plain, data


def write_manifest(store: Store, data: Mapping[str, Any]) -> None:
    """Write the checksum of a manifest, then the manifest."""
    text = json.dumps(data).encode()
    # The checksum comes first, because a folder with a manifest counts as complete.
    store.write(CHECKSUM, _checksum(text))
    store.write(MANIFEST, text)


def _checksum(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()


def merge_index(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the tensor indexes of all ranks and check that the slices cover every tensor exactly once.

    Args:
        parts: The index of each rank: name -> {shape, kinds: {kind: {dtype, boxes}}}.

    Raises:
        CheckpointError: There is a gap or an overlap, or ranks disagree on a shape or a dtype.
    """
    tensors: dict[str, Any] = {}
    for part in parts:
        for name, entry in part.items():
            merged = tensors.setdefault(name, {"shape": entry["shape"], "kinds": {}})
            if merged["shape"] != entry["shape"]:
                raise CheckpointError(f"ranks disagree on the shape of {name}: {merged['shape']} and {entry['shape']}")
            for kind, stored in entry["kinds"].items():
                merged_entry = merged["kinds"].setdefault(kind, {"dtype": stored["dtype"], "boxes": []})
                if merged_entry["dtype"] != stored["dtype"]:
                    raise CheckpointError(f"ranks disagree on {kind} of {name}: {merged_entry['dtype']} and {stored['dtype']}")
                merged_entry["boxes"].extend(stored["boxes"])
    for name, entry in tensors.items():
        for kind, stored in entry["kinds"].items():
            if not covers(entry["shape"], [TensorSlice(tuple(b["offset"]), tuple(b["length"])) for b in stored["boxes"]]):
                raise CheckpointError(f"the slices of {kind} of {name} do not cover {entry['shape']} exactly once")
    return tensors

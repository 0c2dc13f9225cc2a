"""What a checkpoint holds: the manifest, read as an untrusted file. Imports no torch.

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
SEAL = "manifest.xxh3"
MANIFEST_LIMIT = 2**31
MODEL = f"{MODEL_FOLDER}/"
TEMPLATES = "additional_chat_templates"
"""The one folder inside `model/`, where a tokenizer has several chat templates."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")
"""Endings of files that hold weights, or say which do."""


@dataclass(frozen=True)
class StoredBox:
    """A part of a tensor in a file.

    Args:
        box: in the global tensor.
        file: name inside the folder.
        key: name inside the file.
    """

    box: TensorSlice
    file: str
    key: str


@dataclass(frozen=True)
class StoredTensor:
    """All parts of one kind (value, exp_avg, exp_avg_sq) of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


class Manifest:
    """What a checkpoint holds.

    Args:
        data: the parsed JSON.
        store: the checkpoint's folder.
    """

    def __init__(self, data: Mapping[str, Any], store: Store) -> None:
        self.data, self.store = data, store

    @classmethod
    def read(cls, store: Store) -> "Manifest":
        """Read and check a folder, without reading tensors.

        Raises:
            DamagedError: no manifest, one that does not match its checksum, a file missing or of another size.
            CheckpointError: an unknown format, a manifest that makes no sense, a path that leaves the folder.
        """
        where = f"{store}/{MANIFEST}"
        size = store.size(MANIFEST)
        if size is None:
            raise DamagedError(f"{store} is no complete checkpoint: it has no {MANIFEST}")
        if size > MANIFEST_LIMIT:
            raise CheckpointError(f"{where} has {size} bytes, more than any checkpoint's")
        text = store.read(MANIFEST)
        checksum = store.read(SEAL) if store.size(SEAL) == 16 else b""
        if not checksum:
            raise DamagedError(f"{store} is no complete checkpoint: it has no {SEAL}")
        if checksum != _seal(text):
            raise DamagedError(f"{where} does not match {SEAL}: the checkpoint is damaged")
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise CheckpointError(f"{where} cannot be read: {e}") from e
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise CheckpointError(f"{where} has format {found!r}; this version reads format {FORMAT}")
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
            raise ValueError(f"{data['world_size']} ranks, but the state of {len(data['ranks'])}")
        for key, kind in (("parallel", dict), ("engine", dict), ("model", dict), ("extra", dict), ("backend", str)):
            if not isinstance(data[key], kind):
                raise ValueError(f"{key} is {type(data[key]).__name__}")
        count(data["schedule"]["step"])
        if data["optim"] is not None and not isinstance(data["optim"]["name"], str):
            raise ValueError("optim has no name")
        if not isinstance(data["engine"]["precision"]["params"], str):
            raise ValueError("engine.precision.params is no name of a number format")
        for name, number in ((data["optimizer"] or {}).get("step") or {}).items():
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 2**53:
                raise ValueError(f"{name} has been updated {number!r} times")
        for name, entry in data["files"].items():
            self._check_file(name, entry)
        for name in data["tensors"]:
            self.kinds(name)

    def _check_file(self, name: str, entry: Mapping[str, Any]) -> None:
        parts = name.removeprefix(MODEL).split("/")
        known = name.startswith(f"{MODEL}{TEMPLATES}/") and len(parts) == 2
        if (len(parts) > 1 and not known) or any(p in ("", ".", "..") or "\\" in p or "\0" in p for p in parts):
            raise CheckpointError(
                f"{self.store}/{MANIFEST} names the file {name!r}, which is not a plain name inside the folder"
            )
        said, actual = count(entry["bytes"]), self.store.size(name)
        if actual != said:
            shown = "missing" if actual is None else f"{actual} bytes"
            raise DamagedError(f"{self.store}/{name} is {shown}; the manifest says {said} bytes: the checkpoint is damaged")
        if len(entry["xxh3"]) != -(-said // CHUNK_BYTES) or not all(isinstance(d, str) for d in entry["xxh3"]):
            raise ValueError(f"{name} has {len(entry['xxh3'])} checksums for {said} bytes")

    @property
    def step(self) -> int:
        """Number of the checkpoint."""
        found: int = self.data["step"]
        return found

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.data["tensors"])

    def kinds(self, name: str) -> dict[str, StoredTensor]:
        """The kinds stored of one tensor."""
        entry = self.data["tensors"][name]
        shape = shape_of(entry["shape"])
        found = {}
        for kind, stored in entry["kinds"].items():
            if stored["dtype"] not in ITEMSIZE:
                raise ValueError(f"{kind} of {name} has the unknown dtype {stored['dtype']!r}")
            found[kind] = StoredTensor(shape, stored["dtype"], tuple(self._box(b, shape) for b in stored["boxes"]))
        return found

    def _box(self, b: Mapping[str, Any], shape: tuple[int, ...]) -> StoredBox:
        if b["file"] not in self.data["files"]:
            raise CheckpointError(f"{self.store}/{MANIFEST} uses the file {b['file']!r}, which it does not list")
        box = TensorSlice(shape_of(b["offset"]), shape_of(b["length"]))
        if len(box.offset) != len(shape) or any(end > n for end, n in zip(box.end, shape, strict=True)):
            raise ValueError(f"a box from {list(box.offset)}, {list(box.length)} long, of a tensor of {list(shape)}")
        return StoredBox(box, b["file"], b["key"])

    def tensor_files(self, *, verify: bool = True) -> TensorFiles:
        """Reads its tensors.

        Args:
            verify: compare what is read with the checksums.
        """
        return TensorFiles(self.store, {n: e["xxh3"] for n, e in self.data["files"].items()} if verify else None)

    def check_cover(self, files: TensorFiles, name: str, kind: str) -> StoredTensor:
        """A tensor whose boxes cover it exactly once, each as large in its file as the manifest says.

        Raises:
            CheckpointError: a gap, an overlap, or a box that its file has otherwise.
        """
        found = self.kinds(name)[kind]
        # First that each is there: boxes that nothing stands behind cost a writer nothing, and a reader time.
        for box in found.boxes:
            self.check_box(files, box, found.dtype)
        if not covers(found.shape, [b.box for b in found.boxes]):
            raise CheckpointError(f"{self.store}: the boxes of {kind} of {name} do not cover {list(found.shape)} exactly once")
        return found

    def check_box(self, files: TensorFiles, box: StoredBox, dtype: str) -> None:
        """Compare a box with its file.

        Raises:
            CheckpointError: they differ.
        """
        array = files.array(box.file, box.key)
        if (array.dtype, array.shape) != (dtype, box.box.length):
            raise CheckpointError(
                f"{self.store}/{box.file} has {array.dtype} {list(array.shape)} under {box.key!r}, the manifest {dtype} "
                f"{list(box.box.length)}"
            )

    def model_files(self) -> Iterator[tuple[str, bytes]]:
        """Config, tokenizer and the like: names and contents, checked.

        Raises:
            DamagedError: one does not match its checksum.
        """
        for name, entry in self.data["files"].items():
            if name.startswith(MODEL):
                plain = name.removeprefix(MODEL)
                if plain.startswith(".") or plain.endswith(WEIGHTS):
                    raise CheckpointError(f"{self.store}/{name} is none of the files that stand beside a model's weights")
                data = self.store.read(name)
                if digests_of(data) != entry["xxh3"]:
                    raise DamagedError(f"{self.store}/{name} does not match its checksum: the checkpoint is damaged")
                yield plain, data


def write_manifest(store: Store, data: Mapping[str, Any]) -> None:
    """Write a manifest and, before it, its checksum."""
    text = json.dumps(data).encode()
    store.write(SEAL, _seal(text))
    store.write(MANIFEST, text)


def _seal(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()


def merge_index(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One index of tensors from those of all ranks, checked to cover every tensor exactly once.

    Args:
        parts: of each rank: name -> {shape, kinds: {kind: {dtype, boxes}}}.

    Raises:
        CheckpointError: a gap, an overlap, or ranks that disagree on a shape or a dtype.
    """
    tensors: dict[str, Any] = {}
    for part in parts:
        for name, entry in part.items():
            whole_entry = tensors.setdefault(name, {"shape": entry["shape"], "kinds": {}})
            if whole_entry["shape"] != entry["shape"]:
                raise CheckpointError(f"ranks disagree on the shape of {name}: {whole_entry['shape']} and {entry['shape']}")
            for kind, stored in entry["kinds"].items():
                known = whole_entry["kinds"].setdefault(kind, {"dtype": stored["dtype"], "boxes": []})
                if known["dtype"] != stored["dtype"]:
                    raise CheckpointError(f"ranks disagree on {kind} of {name}: {known['dtype']} and {stored['dtype']}")
                known["boxes"].extend(stored["boxes"])
    for name, entry in tensors.items():
        for kind, stored in entry["kinds"].items():
            if not covers(entry["shape"], [TensorSlice(tuple(b["offset"]), tuple(b["length"])) for b in stored["boxes"]]):
                raise CheckpointError(f"the boxes of {kind} of {name} do not cover {entry['shape']} exactly once")
    return tensors

"""Folders of checkpoints: the manifest, the atomic commit, finding the last complete one, rotation.

A checkpoint is a folder `step-XXXXXXXX` whose `manifest.json` was written last, inside a temporary sibling that was then
renamed. Whatever instant a process dies at, a folder under its final name is complete.
"""

import json
import os
import shutil
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..boxes import Box, covers
from ..errors import CheckpointError
from .tensorfile import file_checksum, fsync_folder, write_json

FORMAT = 1
MANIFEST = "manifest.json"
TEMPORARY, DELETED = ".tmp-", ".del-"


def folder_name(step: int) -> str:
    """`step-00000100`."""
    return f"step-{step:08d}"


@dataclass(frozen=True, kw_only=True)
class StoredBox:
    """A part of a tensor in a file.

    Args:
        box: in the global tensor.
        file: name inside the folder.
        key: name inside the file.
        xxh3: of its bytes.
    """

    box: Box
    file: str
    key: str
    xxh3: str

    def to_json(self) -> dict[str, Any]:
        """The manifest's form."""
        return {
            "offset": list(self.box.offset),
            "length": list(self.box.length),
            "file": self.file,
            "key": self.key,
            "xxh3": self.xxh3,
        }


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """All parts of one kind (value, exp_avg, exp_avg_sq) of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


class Manifest:
    """What a checkpoint holds.

    Args:
        data: the parsed JSON.
        folder: where it lies.
    """

    def __init__(self, data: Mapping[str, Any], folder: Path) -> None:
        self.data, self.folder = data, folder

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read and check a folder, without reading tensors.

        Raises:
            CheckpointError: no manifest, an unknown format, a file missing or of another size, a path that leaves the
                folder.
        """
        path = folder / MANIFEST
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError as e:
            inside = [*steps(folder), *steps(folder / "checkpoints")]
            hint = f"; did you mean {inside[-1]}?" if inside else ""
            raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}{hint}") from e
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{path} cannot be read: {e}") from e
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise CheckpointError(f"{path} has format {found!r}; this version reads format {FORMAT}")
        try:
            for name, entry in data["files"].items():
                _check_file(path, name, entry)
            manifest = cls(data, folder)
            for name in data["tensors"]:
                manifest.kinds(name)
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise CheckpointError(f"{path} is malformed: {type(e).__name__} {e}") from e
        return manifest

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.data["tensors"])

    def kinds(self, name: str) -> dict[str, StoredTensor]:
        """The kinds stored of one tensor."""
        entry = self.data["tensors"][name]
        shape = tuple(entry["shape"])
        return {
            kind: StoredTensor(
                shape=shape,
                dtype=stored["dtype"],
                boxes=tuple(self._box(b) for b in stored["boxes"]),
            )
            for kind, stored in entry["kinds"].items()
        }

    def _box(self, b: Mapping[str, Any]) -> StoredBox:
        if b["file"] not in self.data["files"]:
            raise CheckpointError(f"{self.folder / MANIFEST} uses the file {b['file']!r}, which it does not list")
        return StoredBox(box=Box(tuple(b["offset"]), tuple(b["length"])), file=b["file"], key=b["key"], xxh3=b["xxh3"])


def _check_file(manifest: Path, name: str, entry: Mapping[str, Any]) -> None:
    plain = name.removeprefix("model/")
    if Path(plain).name != plain or plain in ("", ".", ".."):
        raise CheckpointError(f"{manifest} names the file {name!r}, which is not a plain name inside the folder")
    file = manifest.parent / name
    linked = file.is_symlink() or file.parent.is_symlink()
    actual = file.stat().st_size if file.is_file() and not linked else None
    if actual != entry["bytes"]:
        shown = "missing" if actual is None else f"{actual} bytes"
        raise CheckpointError(f"{file} is {shown}; the manifest says {entry['bytes']} bytes: the checkpoint is damaged")
    # Tensors have checksums of their own, which are compared while they are read.
    if "xxh3" in entry and file_checksum(file) != entry["xxh3"]:
        raise CheckpointError(f"{file} does not match its checksum: the checkpoint is damaged")


def describe_files(folder: Path, sub: str) -> dict[str, dict[str, Any]]:
    """Sizes and checksums of the small files of a sub-folder, each synced to disk."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted((folder / sub).iterdir()):
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
        found[f"{sub}/{file.name}"] = {"bytes": file.stat().st_size, "xxh3": file_checksum(file)}
    fsync_folder(folder / sub)
    return found


def merge_index(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One index of tensors from those of all ranks, checked to cover every tensor exactly once.

    Args:
        parts: of each rank: name -> {shape, kinds: {kind: {dtype, boxes}}}.

    Raises:
        CheckpointError: a gap, an overlap, or ranks that disagree on a shape.
    """
    tensors: dict[str, Any] = {}
    for part in parts:
        for name, entry in part.items():
            whole_entry = tensors.setdefault(name, {"shape": entry["shape"], "kinds": {}})
            if whole_entry["shape"] != entry["shape"]:
                raise CheckpointError(f"ranks disagree on the shape of {name}: {whole_entry['shape']} and {entry['shape']}")
            for kind, stored in entry["kinds"].items():
                boxes = whole_entry["kinds"].setdefault(kind, {"dtype": stored["dtype"], "boxes": []})["boxes"]
                boxes.extend(stored["boxes"])
    for name, entry in tensors.items():
        for kind, stored in entry["kinds"].items():
            if not covers(entry["shape"], [Box(tuple(b["offset"]), tuple(b["length"])) for b in stored["boxes"]]):
                raise CheckpointError(f"the boxes of {kind} of {name} do not cover {entry['shape']} exactly once")
    return tensors


def new_temporary(root: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into."""
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"{TEMPORARY}{folder_name(step)}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return folder


def commit(temporary: Path, step: int, manifest: Mapping[str, Any]) -> Path:
    """Write the manifest, and give the folder its final name."""
    write_json(temporary / MANIFEST, manifest)
    fsync_folder(temporary)
    final = temporary.parent / folder_name(step)
    if final.exists():
        # Renamed first: a crash in between leaves an older checkpoint or the new one, never a half-deleted folder.
        final.rename(final.parent / f"{DELETED}{final.name}-{uuid.uuid4().hex[:8]}")
    temporary.rename(final)
    fsync_folder(final.parent)
    sweep(final.parent, deleted_only=True)
    return final


def sweep(root: Path, *, deleted_only: bool = False) -> None:
    """Remove what deletions and, while nobody saves, what crashed saves left behind.

    Args:
        root: folder of all checkpoints of a run.
        deleted_only: leave temporary folders alone: another save may be writing one.
    """
    if root.is_dir():
        for folder in root.iterdir():
            if folder.name.startswith(DELETED if deleted_only else (TEMPORARY, DELETED)):
                shutil.rmtree(folder)


def steps(root: Path) -> list[Path]:
    """Checkpoint folders by name, oldest first, complete or not."""
    return sorted(p for p in root.glob("step-*") if p.is_dir()) if root.is_dir() else []


def latest(root: Path) -> tuple[Manifest | None, list[str]]:
    """The last complete checkpoint, and why later ones were passed over."""
    skipped: list[str] = []
    for folder in reversed(steps(root)):
        try:
            return Manifest.read(folder), skipped
        except CheckpointError as e:
            skipped.append(str(e))
    return None, skipped


def rotate(root: Path, keep_last: int | None, *, newest: int, keep: Collection[str] = ()) -> None:
    """Delete old checkpoints.

    Args:
        root: folder of all checkpoints of a run.
        keep_last: how many to keep; None keeps all.
        newest: the step just saved. Later folders are damaged ones that were passed over, and must not count as kept.
        keep: names that stay.
    """
    if keep_last is None:
        return
    for folder in [f for f in steps(root) if f.name <= folder_name(newest)][: -max(1, keep_last)]:
        if folder.name in keep:
            continue
        folder.rename(root / f"{DELETED}{folder.name}-{uuid.uuid4().hex[:8]}")
    sweep(root, deleted_only=True)

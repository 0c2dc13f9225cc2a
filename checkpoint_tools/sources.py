"""Tensors by name, wherever they lie: in a checkpoint of any engine and layout, or in a Hugging Face folder.

Imports no torch. Parts are read as raw numbers of the tensor's element size, several threads at a time.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine.checkpoint.hf_folder import CONFIGS, MODEL_STEM, Entry
from ..engine.checkpoint.manifest import Manifest
from ..engine.checkpoint.retention import find_checkpoint
from ..engine.checkpoint.safetensors_io import TensorFiles
from ..engine.checkpoint.storage import LocalStore
from ..engine.checkpoint.tensor_slices import TensorSlice, intersect
from ..engine.errors import CheckpointError


class Source(ABC):
    """Named tensors.

    Args:
        label: where they lie, for people.
        entries: name -> (dtype, shape).
    """

    def __init__(self, label: str, entries: Mapping[str, Entry]) -> None:
        self.label, self.entries = label, entries

    @abstractmethod
    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """Copy a part of a tensor into an array of raw numbers, of the part's shape.

        Raises:
            CheckpointError: damaged, or missing.
        """

    @abstractmethod
    def model_files(self) -> dict[str, bytes]:
        """Config, tokenizer and the like."""


class CheckpointSource(Source):
    """One kind of a checkpoint's tensors.

    Args:
        manifest: of the checkpoint.
        kind: value, exp_avg or exp_avg_sq.
        verify: compare what is read with the checksums.

    Raises:
        CheckpointError: boxes that leave gaps, overlap, or are not what their files hold.
    """

    def __init__(self, manifest: Manifest, kind: str = "value", *, verify: bool = True) -> None:
        self.manifest = manifest
        self._files = manifest.tensor_files(verify=verify)
        names = [name for name in manifest.names if kind in manifest.data["tensors"][name]["kinds"]]
        self._tensors = {name: manifest.check_cover(self._files, name, kind) for name in names}
        super().__init__(str(manifest.store), {name: (t.dtype, t.shape) for name, t in self._tensors.items()})

    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """See `Source`."""
        for box in self._tensors[name].boxes:
            shared = intersect(part, box.box)
            if shared is not None:
                inside = shared.seen_from(box.box.offset)
                self._files.read(box.file, box.key, inside, out[shared.within(part.offset)] if part.offset else out)

    def model_files(self) -> dict[str, bytes]:
        """See `Source`."""
        return dict(self.manifest.model_files())


class FolderSource(Source):
    """A Hugging Face folder: safetensors files, with an index or one alone.

    Args:
        folder: of a model, or of adapters.

    Raises:
        CheckpointError: it has no safetensors files, or its index names some that it has not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = TensorFiles(LocalStore(folder, links=True))
        self._where = self._index()
        entries = {}
        for name, file in self._where.items():
            array = self._files.array(file, name)
            entries[name] = (array.dtype, array.shape)
        super().__init__(str(folder), entries)

    def _index(self) -> dict[str, str]:
        for stem in CONFIGS:
            index, single = self.folder / f"{stem}.safetensors.index.json", f"{stem}.safetensors"
            if index.is_file():
                try:
                    found: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
                    outside = sorted(f for f in set(found.values()) if Path(f).name != f or not (self.folder / f).is_file())
                except (ValueError, KeyError, TypeError, AttributeError) as e:
                    raise CheckpointError(f"{index} cannot be read: {type(e).__name__} {e}") from e
                if outside:
                    raise CheckpointError(f"{index} names {outside[0]!r}, which is not in the folder; it is incomplete")
                return found
            if (self.folder / single).is_file():
                return dict.fromkeys(self._files.arrays(single), single)
        raise CheckpointError(f"{self.folder} has neither model.safetensors nor model.safetensors.index.json")

    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """See `Source`."""
        self._files.read(self._where[name], name, part, out)

    def model_files(self) -> dict[str, bytes]:
        """See `Source`. Everything but weights."""
        weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".safetensors.index.json")
        found = sorted(p for p in self.folder.iterdir() if p.is_file() and not p.name.endswith(weights))
        return {p.name: p.read_bytes() for p in found if not p.name.startswith(".")}


def is_hf_folder(where: Path | str) -> bool:
    """Whether a path is a Hugging Face folder."""
    path = Path(where)
    return path.is_dir() and any(
        (path / config).is_file() or any(path.glob(f"{stem}*.safetensors")) for stem, config in CONFIGS.items()
    )


def open_source(where: Path | str, *, verify: bool = True) -> Source:
    """The tensors of a checkpoint, of the last one of a run, or of a Hugging Face folder.

    Raises:
        CheckpointError: it is none of these.
    """
    if is_hf_folder(where):
        return FolderSource(Path(where))
    try:
        manifest = find_checkpoint(where)
    except CheckpointError as e:
        if "://" not in str(where) and not Path(where).is_dir():
            raise CheckpointError(f"{where} is no folder") from e
        raise
    return CheckpointSource(manifest, verify=verify)


def model_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """What config.json says; empty where there is none."""
    try:
        found = json.loads(files.get(CONFIGS[MODEL_STEM], b"{}"))
    except ValueError as e:
        raise CheckpointError(f"{CONFIGS[MODEL_STEM]} cannot be read: {e}") from e
    return found if isinstance(found, dict) else {}


def size_of(count: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"

"""Access to tensors by name, in a checkpoint from any engine and layout or in a Hugging Face folder. Parts are read as raw numbers of the tensor's element size; several threads may read at
once.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine.checkpoint.hf_folder import CONFIGS, MODEL_STEM, Entry
from ..engine.checkpoint.manifest import CheckpointManifest
from ..engine.checkpoint.retention import find_checkpoint
from ..engine.checkpoint.safetensors_io import TensorFiles
from ..engine.checkpoint.storage import LocalStore
from ..engine.checkpoint.tensor_slices import TensorSlice, intersect
from ..engine.errors import CheckpointError


class TensorSource(ABC):
    """A collection of named tensors.

    Args:
        label: The location of the tensors, for messages.
        entries: A mapping from each name to (dtype, shape).
    """

    def __init__(self, label: str, entries: Mapping[str, Entry]) -> None:
        self.label, self.entries = label, entries

    @abstractmethod
    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """Copy a part of a tensor into an array of raw numbers, of the part's shape.

        Raises:
            CheckpointError: The data is damaged or missing.
        """

    @abstractmethod
    def model_files(self) -> dict[str, bytes]:
        """Return the config, tokenizer and similar files, by name."""


class CheckpointSource(TensorSource):
    """The tensors of one kind in a checkpoint.

    Args:
        manifest: The manifest of the checkpoint.
        kind: The kind of tensors: value, exp_avg or exp_avg_sq.
        verify: Whether to check the data that is read against its checksums.

    Raises:
        CheckpointError: Stored slices leave gaps, overlap, or do not match the contents of their files.
    """

    def __init__(self, manifest: CheckpointManifest, kind: str = "value", *, verify: bool = True) -> None:
        self.manifest = manifest
        self._files = manifest.tensor_files(verify=verify)
        names = [name for name in manifest.names if kind in manifest.data["tensors"][name]["kinds"]]
        # Checked before anything is read, so that a gap is an error and not memory without values.
        self._tensors = {name: manifest.check_cover(self._files, name, kind) for name in names}
        super().__init__(str(manifest.store), {name: (t.dtype, t.shape) for name, t in self._tensors.items()})

    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """See `TensorSource`."""
        for stored_slice in self._tensors[name].boxes:
            shared = intersect(part, stored_slice.box)
            if shared is not None:
                inside = shared.seen_from(stored_slice.box.offset)
                self._files.read(
                    stored_slice.file, stored_slice.key, inside, out[shared.within(part.offset)] if part.offset else out
                )

    def model_files(self) -> dict[str, bytes]:
        """See `TensorSource`."""
        return dict(self.manifest.model_files())


class FolderSource(TensorSource):
    """The tensors of a Hugging Face folder: a single safetensors file, or several with an index.

    Args:
        folder: The folder of a model or of adapters.

    Raises:
        CheckpointError: The folder has no safetensors files, or its index names missing ones.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Models in the Hub's cache are folders of links.
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
                    file_by_name: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
                    # The index may come from elsewhere, and must not name files outside the folder.
                    outside = sorted(
                        f for f in set(file_by_name.values()) if Path(f).name != f or not (self.folder / f).is_file()
                    )
                except (ValueError, KeyError, TypeError, AttributeError) as e:
                    raise CheckpointError(f"{index} cannot be read: {type(e).__name__} {e}") from e
                if outside:
                    raise CheckpointError(f"{index} names {outside[0]!r}, which is not in the folder; it is incomplete")
                return file_by_name
            if (self.folder / single).is_file():
                return dict.fromkeys(self._files.arrays(single), single)
        raise CheckpointError(f"{self.folder} has neither model.safetensors nor model.safetensors.index.json")

    def read(self, name: str, part: TensorSlice, out: Any) -> None:
        """See `TensorSource`."""
        self._files.read(self._where[name], name, part, out)

    def model_files(self) -> dict[str, bytes]:
        """See `TensorSource`. Weights are left out."""
        weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".safetensors.index.json")
        files = sorted(p for p in self.folder.iterdir() if p.is_file() and not p.name.endswith(weights))
        return {p.name: p.read_bytes() for p in files if not p.name.startswith(".")}


def is_hf_folder(where: Path | str) -> bool:
    """Return whether a path is a Hugging Face folder."""
    path = Path(where)
    return path.is_dir() and any(
        (path / config).is_file() or any(path.glob(f"{stem}*.safetensors")) for stem, config in CONFIGS.items()
    )


def open_source(where: Path | str, *, verify: bool = True) -> TensorSource:
    """Open the tensors of a checkpoint, of the last checkpoint of a run, or of a Hugging Face folder.

    Raises:
        CheckpointError: The path is none of these.
    """
    if is_hf_folder(where):
        return FolderSource(Path(where))
    try:
        manifest = find_checkpoint(where)
    except CheckpointError as e:
        if "://" not in str(where) and not Path(where).is_dir():
            raise CheckpointError(f"{where} is not a folder") from e
        raise
    return CheckpointSource(manifest, verify=verify)


def model_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Parse config.json; return an empty dictionary if there is none."""
    try:
        config = json.loads(files.get(CONFIGS[MODEL_STEM], b"{}"))
    except ValueError as e:
        raise CheckpointError(f"{CONFIGS[MODEL_STEM]} cannot be read: {e}") from e
    return config if isinstance(config, dict) else {}


def size_of(count: float) -> str:
    """Format a number of bytes for display."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"

"""Hugging Face folders of safetensors files: assigning tensors to files, and writing them in any order.

Exporting from a running engine and merging a checkpoint share this module, so that both produce the same files.
"""

import glob
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .manifest import TEMPLATES
from .safetensors_io import CheckedFile, layout, read_metadata, tensor_bytes
from .storage import LocalStore, fsync_folder

SHARD_BYTES = 5 * 2**30
MODEL_STEM, ADAPTER_STEM = "model", "adapter_model"
WRITER = "drivetrain"
"""Written to the header of every exported weight file: the next export may replace an export, and nothing else."""
BESIDE = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
"""Suffixes of all files in an export."""
CONFIGS = {MODEL_STEM: "config.json", ADAPTER_STEM: "adapter_config.json"}

Entry = tuple[str, tuple[int, ...]]
"""The (safetensors dtype, shape) of a tensor."""


@dataclass(frozen=True)
class FolderPlan:
    """The files of a folder.

    Args:
        stem: The stem of the file names: `model`, or `adapter_model` for an adapter-only export.
        files: The files: name -> key -> (dtype, shape), in the order of the tensors in the file.
    """

    stem: str
    files: Mapping[str, Mapping[str, Entry]]

    @property
    def total_bytes(self) -> int:
        """The total size of all tensors."""
        return sum(tensor_bytes(*entry) for part in self.files.values() for entry in part.values())

    def index(self) -> bytes | None:
        """Return the contents of `*.safetensors.index.json`; None for a single file."""
        if len(self.files) == 1:
            return None
        weight_map = {key: name for name, part in self.files.items() for key in part}
        return json.dumps({"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}, indent=2).encode()


def plan_folder(entries: Mapping[str, Entry], shard_bytes: int = SHARD_BYTES, *, adapters: bool = False) -> FolderPlan:
    """Assign tensors to files, in the natural order of their names.

    Args:
        entries: The tensors: key -> (dtype, shape).
        shard_bytes: The maximum size of a file, unless a single tensor is larger.
        adapters: Whether the export contains only adapters, which stay in one file.
    """
    parts: list[dict[str, Entry]] = [{}]
    used = 0
    if adapters:
        # peft expects a single file.
        shard_bytes = sum(tensor_bytes(*entry) for entry in entries.values())
    for key in sorted(entries, key=natural):
        size = tensor_bytes(*entries[key])
        if parts[-1] and used + size > shard_bytes:
            parts.append({})
            used = 0
        parts[-1][key] = entries[key]
        used += size
    stem = ADAPTER_STEM if adapters else MODEL_STEM
    names = [
        f"{stem}.safetensors" if len(parts) == 1 else f"{stem}-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        for i in range(len(parts))
    ]
    return FolderPlan(stem, dict(zip(names, parts, strict=True)))


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that puts layer 2 before layer 10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name))


class FolderWriter:
    """Writes the tensors of a plan, in any order and from several threads.

    Args:
        folder: The folder to write into.
        plan: The plan of its files.
    """

    def __init__(self, folder: Path, plan: FolderPlan) -> None:
        self._folder, self._plan = folder, plan
        self._where: dict[str, tuple[str, int]] = {}
        for name, part in plan.files.items():
            first, starts, size = layout(part, {"writer": WRITER})
            with open(folder / name, "xb") as file:
                # Allocate the full size at once, so that a full disk is noticed now.
                os.posix_fallocate(file.fileno(), 0, size)
            self._put(name, 0, memoryview(first))
            self._where |= {key: (name, start) for key, start in starts.items()}

    def write(self, key: str, start: int, data: memoryview) -> None:
        """Write a tensor's bytes, or some of them starting at byte `start`."""
        name, first = self._where[key]
        self._put(name, first + start, data)

    def _put(self, name: str, start: int, data: memoryview) -> None:
        # Reopened for every block: a model may have more files than a process may keep open.
        handle = os.open(self._folder / name, os.O_WRONLY)
        try:
            while len(data):
                count = os.pwrite(handle, data, start)
                start, data = start + count, data[count:]
        finally:
            os.close(handle)

    def finish(self) -> None:
        """Sync all files to disk and write the index, once all tensors have been written."""
        for name in self._plan.files:
            with open(self._folder / name, "rb") as file:
                os.fsync(file.fileno())
        index = self._plan.index()
        if index is not None:
            write_files(self._folder, {f"{self._plan.stem}.safetensors.index.json": index})


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write small files, each synced to disk."""
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with open(folder / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def model_files(files: Mapping[str, bytes], *, adapters: bool) -> dict[str, bytes]:
    """Return the files that belong next to the weights.

    A merged model must not look like an adapter to peft, nor an adapter like a model to transformers.
    """
    excluded = CONFIGS[MODEL_STEM if adapters else ADAPTER_STEM]
    return {name: data for name, data in files.items() if name != excluded}


def check_target(final: Path | str) -> None:
    """Check that a target is free, or contains only an earlier export of ours, which may be replaced.

    Raises:
        CheckpointError: Something else is there; the message says what.
    """
    if ":/" in str(final):
        raise CheckpointError(f"{final} is a URL; exports are written to local folders")
    final = Path(final)
    if not final.exists():
        return
    if not final.is_dir():
        raise CheckpointError(f"{final} is a file; choose a folder")
    store, is_export = LocalStore(final), False
    for path in sorted(final.iterdir()):
        if path.suffix == ".safetensors" and path.is_file():
            file = CheckedFile(store, path.name, path.stat().st_size, None)
            is_export = read_metadata(file).get("writer") == WRITER
        if path.name == TEMPLATES:
            continue
        if (path.suffix == ".safetensors" and not is_export) or path.suffix not in BESIDE or not path.is_file():
            raise CheckpointError(
                f"{final} exists and contains {path.name}, which no export wrote and which would be lost; choose "
                "another folder"
            )
    if not is_export and any(final.iterdir()):
        raise CheckpointError(f"{final} exists and is not an export, so its contents would be lost; choose another folder")


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yield a folder to fill, which takes its final name and replaces an older folder once everything is written."""
    check_target(final)
    # The temporary folder must be on the file system of the target itself, not of a link to it, for the rename.
    final = final.resolve()
    final.parent.mkdir(parents=True, exist_ok=True)
    # Escaped, because a name may look like a pattern, which other exports' folders match.
    name = glob.escape(final.name)
    for leftover in [*final.parent.glob(f".tmp-{name}-????????"), *final.parent.glob(f".del-{name}-????????")]:
        # Left behind by a write that was killed.
        shutil.rmtree(leftover)
    temporary = final.parent / f".tmp-{final.name}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        yield temporary
        # First everything is on disk, then an older folder loses its name, then the new one takes it, and only then
        # is the older one deleted.
        fsync_folder(temporary)
        if final.is_dir() and any(final.iterdir()):
            old = final.parent / f".del-{final.name}-{uuid.uuid4().hex[:8]}"
            final.rename(old)
            temporary.rename(final)
            shutil.rmtree(old)
        else:
            # There is no older folder, or it is empty.
            temporary.rename(final)
        fsync_folder(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise

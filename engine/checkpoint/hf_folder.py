"""A Hugging Face folder of safetensors files: which tensor goes where, and writing them in any order. Imports no torch.

Export from a running engine and merging of a checkpoint share it, so that they make the same files.
"""

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
"""In the header of every file of weights that is exported: an export is replaced by the next one, and nothing else is."""
BESIDE = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
"""Endings of all that an export holds."""
CONFIGS = {MODEL_STEM: "config.json", ADAPTER_STEM: "adapter_config.json"}

Entry = tuple[str, tuple[int, ...]]
"""(safetensors dtype, shape)."""


@dataclass(frozen=True)
class FolderPlan:
    """The files of a folder.

    Args:
        stem: `model`, or `adapter_model` for adapters alone.
        files: name -> key -> (dtype, shape), in the order in which they lie there.
    """

    stem: str
    files: Mapping[str, Mapping[str, Entry]]

    @property
    def total_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor_bytes(*entry) for part in self.files.values() for entry in part.values())

    def index(self) -> bytes | None:
        """What `*.safetensors.index.json` says; None for a single file."""
        if len(self.files) == 1:
            return None
        where = {key: name for name, part in self.files.items() for key in part}
        return json.dumps({"metadata": {"total_size": self.total_bytes}, "weight_map": where}, indent=2).encode()


def plan_folder(entries: Mapping[str, Entry], shard_bytes: int = SHARD_BYTES, *, adapters: bool = False) -> FolderPlan:
    """Cut tensors, in the natural order of their names, into files.

    Args:
        entries: key -> (dtype, shape).
        shard_bytes: size of a file, at most, unless one tensor is larger.
        adapters: they are adapters alone, which stay in one file.
    """
    parts: list[dict[str, Entry]] = [{}]
    used = 0
    if adapters:
        # peft looks for one file.
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
    """A key that sorts layer 2 before layer 10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name))


class FolderWriter:
    """Writes the tensors of a plan, in any order and from several threads.

    Args:
        folder: to write into.
        plan: of its files.
    """

    def __init__(self, folder: Path, plan: FolderPlan) -> None:
        self._folder, self._plan = folder, plan
        self._where: dict[str, tuple[str, int]] = {}
        for name, part in plan.files.items():
            first, starts, size = layout(part, {"writer": WRITER})
            with open(folder / name, "xb") as file:
                # Its whole size at once: a disk that is too small says so now.
                os.posix_fallocate(file.fileno(), 0, size)
            self._put(name, 0, memoryview(first))
            self._where |= {key: (name, start) for key, start in starts.items()}

    def write(self, key: str, start: int, data: memoryview) -> None:
        """Write a tensor's bytes, or some of them from the byte `start` on."""
        name, first = self._where[key]
        self._put(name, first + start, data)

    def _put(self, name: str, start: int, data: memoryview) -> None:
        # Opened anew for every block: a model may have more files than a process may hold open.
        handle = os.open(self._folder / name, os.O_WRONLY)
        try:
            while len(data):
                count = os.pwrite(handle, data, start)
                start, data = start + count, data[count:]
        finally:
            os.close(handle)

    def finish(self) -> None:
        """When all is written: on the disk, and with its index."""
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
    """Those that belong beside the weights: a merged model must not look like an adapter to peft, nor an adapter like a model
    to transformers."""
    out = CONFIGS[MODEL_STEM if adapters else ADAPTER_STEM]
    return {name: data for name, data in files.items() if name != out}


def check_target(final: Path | str) -> None:
    """Refuse to replace what is no export of ours, and nothing else.

    Raises:
        CheckpointError: it says what is there.
    """
    if ":/" in str(final):
        raise CheckpointError(f"{final} is a URL; exports are written to folders of this machine")
    final = Path(final)
    if not final.exists():
        return
    if not final.is_dir():
        raise CheckpointError(f"{final} is a file; choose a folder")
    store, own = LocalStore(final), False
    for path in sorted(final.iterdir()):
        if path.suffix == ".safetensors" and path.is_file():
            file = CheckedFile(store, path.name, path.stat().st_size, None)
            own = read_metadata(file).get("writer") == WRITER
        if path.name == TEMPLATES:
            continue
        if (path.suffix == ".safetensors" and not own) or path.suffix not in BESIDE or not path.is_file():
            raise CheckpointError(
                f"{final} exists and holds {path.name}, which no export has made; it would be lost: choose another folder"
            )
    if not own and any(final.iterdir()):
        raise CheckpointError(f"{final} exists and is no export; it would be lost: choose another folder")


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to fill that takes its name, and the place of an older one, when all has been written."""
    check_target(final)
    final = final.resolve()
    final.parent.mkdir(parents=True, exist_ok=True)
    for left in [*final.parent.glob(f".tmp-{final.name}-????????"), *final.parent.glob(f".del-{final.name}-????????")]:
        # Of a write that was killed.
        shutil.rmtree(left)
    made = final.parent / f".tmp-{final.name}-{uuid.uuid4().hex[:8]}"
    made.mkdir()
    try:
        yield made
        fsync_folder(made)
        if final.is_dir() and any(final.iterdir()):
            old = final.parent / f".del-{final.name}-{uuid.uuid4().hex[:8]}"
            final.rename(old)
            made.rename(final)
            shutil.rmtree(old)
        else:
            # In place of nothing, or of an empty folder.
            made.rename(final)
        fsync_folder(final.parent)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise

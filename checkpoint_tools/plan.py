"""From tensors of a source to a Hugging Face folder: what will be written, then writing it. Imports no torch by itself."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.checkpoint.hf_folder import (
    CONFIGS,
    MODEL_STEM,
    Entry,
    FolderPlan,
    FolderWriter,
    check_target,
    model_files,
    plan_folder,
    whole_folder,
    write_files,
)
from ..engine.checkpoint.safetensors_io import tensor_bytes
from ..engine.checkpoint.tensor_slices import TensorSlice
from ..engine.errors import CheckpointError, disk_error
from .sources import Source, size_of
from .streaming import BlockBuffer, Blocks, Progress, copy_tensors

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
FLOATS = frozenset(DTYPES.values())


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """A Hugging Face folder that is to be written.

    Args:
        origin: where the tensors come from, for people.
        output: folder to write.
        folder: its weight files.
        files: what stands beside them.
        source: of the tensors.
    """

    origin: str
    output: Path
    folder: FolderPlan
    files: Mapping[str, bytes]
    source: Blocks

    def lines(self) -> list[str]:
        """For people."""
        found = [f"{self.origin} -> {self.output}"]
        for name, part in self.folder.files.items():
            size = sum(tensor_bytes(*entry) for entry in part.values())
            kinds = ", ".join(sorted({dtype for dtype, _ in part.values()}))
            found.append(f"  {name}: {len(part)} tensors, {kinds}, {size_of(size)}")
        return [*found, *(f"  {name}: {len(data)} bytes" for name, data in self.files.items())]


def plan_write(
    origin: str,
    output: Path | str,
    source: Blocks,
    entries: Mapping[str, Entry],
    files: Mapping[str, bytes],
    *,
    dtype: str | None,
    shard_bytes: int,
    only_adapters: bool = False,
) -> WritePlan:
    """What writing these tensors would make.

    Args:
        origin: where they come from.
        output: folder to write.
        source: of their blocks.
        entries: name -> (dtype, shape), of those that are to be written.
        files: config, tokenizer and the like.
        dtype: float32, bfloat16, float16 or float64; None as they are.
        shard_bytes: size of a file, at most, unless one tensor is larger.
        only_adapters: they are adapters alone.

    Raises:
        CheckpointError: an unknown dtype, or the output is something else.
    """
    check_dtype(dtype)
    check_target(Path(output))
    if dtype is not None:
        cast = Cast(source, entries, DTYPES[dtype])
        source, entries, files = cast, cast.entries, with_dtype(files, dtype)
    return WritePlan(
        origin=origin,
        output=Path(output),
        folder=plan_folder(entries, shard_bytes, adapters=only_adapters),
        files=model_files(files, adapters=only_adapters),
        source=source,
    )


def check_dtype(dtype: str | None) -> None:
    """Refuse a number format that is not known.

    Raises:
        CheckpointError: it says which there are.
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype}; it must be one of {', '.join(DTYPES)}")


def apply(plan: WritePlan, workers: int | None = None, progress: Progress | None = None) -> None:
    """Do what a plan says.

    Raises:
        CheckpointError: damaged, or the disk is full; nothing is left behind.
    """
    count = workers or min(8, len(os.sched_getaffinity(0)))
    try:
        with whole_folder(plan.output) as made:
            writer = FolderWriter(made, plan.folder)
            copy_tensors(plan.folder, writer, plan.source, count, progress)
            writer.finish()
            write_files(made, plan.files)
    except OSError as e:
        raise disk_error(str(plan.output), e) from e


class Copied:
    """Blocks as they are stored."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def block(self, name: str, part: TensorSlice, room: BlockBuffer) -> Any:
        """See `Blocks`."""
        out = room.take("copied", self._source.entries[name][0], part.length)
        self._source.read(name, part, out)
        return out


class Cast:
    """Blocks in another number format.

    Args:
        source: of the blocks.
        entries: of the source.
        dtype: of floating-point tensors afterwards.
    """

    def __init__(self, source: Blocks, entries: Mapping[str, Entry], dtype: str) -> None:
        self._source, self._stored = source, entries
        self.entries: dict[str, Entry] = {
            name: (dtype if kind in FLOATS else kind, shape) for name, (kind, shape) in entries.items()
        }

    def block(self, name: str, part: TensorSlice, room: BlockBuffer) -> Any:
        """See `Blocks`."""
        found = self._source.block(name, part, room)
        was, becomes = self._stored[name][0], self.entries[name][0]
        if was == becomes:
            return found
        from ..engine.checkpoint.local_shards import as_tensor, raw

        out = room.take("cast", becomes, part.length)
        as_tensor(out, becomes).copy_(as_tensor(found, was))
        return raw(as_tensor(out, becomes))


def with_dtype(files: Mapping[str, bytes], dtype: str) -> dict[str, bytes]:
    """The model's files with another dtype in config.json."""
    found = dict(files)
    name = CONFIGS[MODEL_STEM]
    if name in found:
        config = json.loads(found[name])
        config["dtype"] = dtype
        config.pop("torch_dtype", None)
        found[name] = (json.dumps(config, indent=2) + "\n").encode()
    return found

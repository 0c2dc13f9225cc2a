"""Writing the tensors of a source into a Hugging Face folder: first a plan of the output, then the output itself."""

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
    atomic_folder,
    check_target,
    model_files,
    plan_folder,
    write_files,
)
from ..engine.checkpoint.safetensors_io import tensor_bytes
from ..engine.checkpoint.tensor_slices import TensorSlice
from ..engine.errors import CheckpointError, disk_error
from .sources import TensorSource, size_of
from .streaming import BlockBuffer, Blocks, ProgressCallback, copy_tensors

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
FLOATS = frozenset(DTYPES.values())


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """A plan of a Hugging Face folder to write.

    Args:
        origin: The location of the tensors, for display.
        output: The folder to write.
        folder: The plan of its weight files.
        files: The other files, by name.
        source: The source of the tensors.
    """

    origin: str
    output: Path
    folder: FolderPlan
    files: Mapping[str, bytes]
    source: Blocks

    def lines(self) -> list[str]:
        """Describe the plan for the user, one string per line."""
        lines = [f"{self.origin} -> {self.output}"]
        # Only an export can be there, since the plan was checked against the folder.
        if self.output.is_dir() and any(self.output.iterdir()):
            lines.append("  replaces the earlier export in this folder")
        for name, part in self.folder.files.items():
            size = sum(tensor_bytes(*entry) for entry in part.values())
            kinds = ", ".join(sorted({dtype for dtype, _ in part.values()}))
            lines.append(f"  {name}: {len(part)} tensors, {kinds}, {size_of(size)}")
        return [*lines, *(f"  {name}: {len(data)} bytes" for name, data in self.files.items())]


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
    """Plan a Hugging Face folder that contains the given tensors.

    Args:
        origin: The location of the tensors, for display.
        output: The folder to write.
        source: The source of the blocks.
        entries: A mapping from the name of each tensor to write to (dtype, shape).
        files: The config, tokenizer and similar files, by name.
        dtype: The dtype to write: float32, bfloat16, float16 or float64; None for the dtype of the source.
        shard_bytes: The maximum size of a weight file, unless a single tensor is larger.
        only_adapters: Whether the tensors are only adapters.

    Raises:
        CheckpointError: The dtype is unknown, or the output is not an export.
    """
    check_dtype(dtype)
    check_target(Path(output))
    if dtype is not None:
        # The config must name the data type of the tensors, because transformers loads models in it.
        cast = CastBlocks(source, entries, DTYPES[dtype])
        source, entries, files = cast, cast.entries, with_dtype(files, dtype)
    return WritePlan(
        origin=origin,
        output=Path(output),
        folder=plan_folder(entries, shard_bytes, adapters=only_adapters),
        files=model_files(files, adapters=only_adapters),
        source=source,
    )


def check_dtype(dtype: str | None) -> None:
    """Check that a dtype is known.

    Raises:
        CheckpointError: The dtype is unknown; the message lists the known ones.
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype}; it must be one of {', '.join(DTYPES)}")


def apply(plan: WritePlan, workers: int | None = None, progress: ProgressCallback | None = None) -> None:
    """Carry out a plan.

    Raises:
        CheckpointError: The source is damaged, or the disk is full. Nothing is left behind.
    """
    # The cores that this process may run on, which may be fewer than those of the machine.
    count = workers or min(8, len(os.sched_getaffinity(0)))
    try:
        with atomic_folder(plan.output) as folder:
            writer = FolderWriter(folder, plan.folder)
            copy_tensors(plan.folder, writer, plan.source, count, progress)
            writer.finish()
            # After the weights, which are most of the work and the likeliest to fail.
            write_files(folder, plan.files)
    except OSError as e:
        raise disk_error(str(plan.output), e) from e


class CopiedBlocks:
    """Blocks in their stored dtype."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def block(self, name: str, part: TensorSlice, room: BlockBuffer) -> Any:
        """See `Blocks`."""
        out = room.take("copied", self._source.entries[name][0], part.length)
        self._source.read(name, part, out)
        return out


class CastBlocks:
    """Blocks cast to a different dtype.

    Args:
        source: The source of the blocks.
        entries: The entries of the source.
        dtype: The dtype of the floating-point tensors after the cast.
    """

    def __init__(self, source: Blocks, entries: Mapping[str, Entry], dtype: str) -> None:
        self._source, self._stored = source, entries
        self.entries: dict[str, Entry] = {
            name: (dtype if kind in FLOATS else kind, shape) for name, (kind, shape) in entries.items()
        }

    def block(self, name: str, part: TensorSlice, room: BlockBuffer) -> Any:
        """See `Blocks`."""
        block_data = self._source.block(name, part, room)
        old_dtype, new_dtype = self._stored[name][0], self.entries[name][0]
        if old_dtype == new_dtype:
            return block_data
        from ..engine.checkpoint.local_shards import as_tensor, raw

        out = room.take("cast", new_dtype, part.length)
        as_tensor(out, new_dtype).copy_(as_tensor(block_data, old_dtype))
        return raw(as_tensor(out, new_dtype))


def with_dtype(files: Mapping[str, bytes], dtype: str) -> dict[str, bytes]:
    """Return the model files with a different dtype in config.json."""
    updated = dict(files)
    name = CONFIGS[MODEL_STEM]
    if name in updated:
        config = json.loads(updated[name])
        config["dtype"] = dtype
        # The older name of the same setting, which must not contradict it.
        config.pop("torch_dtype", None)
        updated[name] = (json.dumps(config, indent=2) + "\n").encode()
    return updated

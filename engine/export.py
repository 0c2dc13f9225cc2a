"""Export of a trained engine to a Hugging Face folder, streamed so that only one tensor is in memory at a time."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from .checkpoint.hf_folder import (
    ADAPTER_STEM,
    CONFIGS,
    SHARD_BYTES,
    FolderPlan,
    FolderWriter,
    atomic_folder,
    check_target,
    model_files,
    plan_folder,
    write_files,
)
from .checkpoint.local_shards import DTYPES, host_bytes
from .errors import CheckpointError, disk_error
from .hf.names import tied_copies

if TYPE_CHECKING:
    from .backend import Adapters
from .base import BaseEngine


def export_hf(
    engine: "BaseEngine", folder: Path | str, *, adapters: "Adapters" = "merged", shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write weights, config and tokenizer in the format of transformers or, for adapters only, of peft. Collective.

    The folder is written atomically; an existing one is replaced.

    Args:
        engine: The initialized engine.
        folder: The folder to write.
        adapters: `merged` to merge adapters into the weights, or `only` to write just the adapters, in peft's format.
        shard_bytes: The maximum size of a file, unless a single tensor is larger.

    Returns:
        The folder.

    Raises:
        CheckpointError: `adapters` is `only` but the model has none, or the folder cannot be written.
    """
    final, only = Path(folder), adapters == "only"
    shapes = engine.weight_shapes(adapters=adapters)
    error: Exception | None = None
    with engine.named_weights(adapters=adapters) as stream:
        if engine.topology.is_main:
            try:
                check_target(final)
                if not shapes:
                    raise CheckpointError("the model has no adapters; export adapters='merged'")
                entries = {name: (DTYPES[dtype], shape) for name, (dtype, shape) in shapes.items()}
                copies = tied_copies(entries, json.loads(engine.model_files[CONFIGS[ADAPTER_STEM]])) if only else {}
                entries |= {copy: entries[name] for copy, name in copies.items()}
                _write(engine, plan_folder(entries, shard_bytes, adapters=only), stream, final, copies, only=only)
            except OSError as e:
                error = disk_error(str(final), e)
            except Exception as e:  # raised below: the other ranks wait in the stream's collectives, so finish these first
                error = e
    # No `collective_errors` block around everything, because an error inside the stream itself must end this rank at once.
    engine.topology.all_gather_object(None, error=error)
    return final


def _write(
    engine: "BaseEngine",
    plan: FolderPlan,
    stream: Iterator[tuple[str, Tensor]],
    final: Path,
    copies: Mapping[str, str],
    *,
    only: bool,
) -> None:
    # The stream yields each tensor once, so its place in the files was planned before, from shapes.
    remaining = {key for part in plan.files.values() for key in part}
    with atomic_folder(final) as folder:
        writer = FolderWriter(folder, plan)
        for key, tensor in stream:
            for name in (key, *(copy for copy, copied in copies.items() if copied == key)):
                writer.write(name, 0, host_bytes(tensor))
                remaining.remove(name)
        assert not remaining, f"named_weights does not yield {min(remaining)}, which weight_shapes lists"
        writer.finish()
        write_files(folder, model_files(engine.model_files, adapters=only))

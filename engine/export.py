"""A trained engine to a Hugging Face folder, streamed: one tensor in memory at a time, whatever the model's size."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from .checkpoint.hf_folder import (
    SHARD_BYTES,
    FolderPlan,
    FolderWriter,
    check_target,
    model_files,
    plan_folder,
    whole_folder,
    write_files,
)
from .checkpoint.local_shards import DTYPES, host_bytes
from .errors import CheckpointError, disk_error

if TYPE_CHECKING:
    from .backend import Adapters
from .base import BaseEngine


def export_hf(
    engine: "BaseEngine", folder: Path | str, *, adapters: "Adapters" = "merged", shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write weights, config and tokenizer as transformers (or, for adapters alone, peft) loads them. Collective.

    The folder appears complete or not at all; an existing one is replaced.

    Args:
        engine: initialised.
        folder: to write.
        adapters: `merged` into the weights, or `only` them, in peft's format.
        shard_bytes: size of a file, at most, unless one tensor is larger.

    Raises:
        CheckpointError: there are no adapters to write alone.
    """
    final, only = Path(folder), adapters == "only"
    shapes = engine.weight_shapes(adapters=adapters)
    # An error leaves the stream first, which is read to its end: the other ranks wait in the next gather.
    with engine.topology.collective_errors(), engine.named_weights(adapters=adapters) as stream:
        if engine.topology.is_main:
            check_target(final)
            if not shapes:
                raise CheckpointError("the model has no adapters; export adapters='merged'")
            plan = plan_folder({n: (DTYPES[dtype], shape) for n, (dtype, shape) in shapes.items()}, shard_bytes, adapters=only)
            try:
                _write(engine, plan, stream, final, only=only)
            except OSError as e:
                raise disk_error(str(final), e) from e
    return final


def _write(engine: "BaseEngine", plan: FolderPlan, stream: Iterator[tuple[str, Tensor]], final: Path, *, only: bool) -> None:
    left = {key for part in plan.files.values() for key in part}
    with whole_folder(final) as made:
        writer = FolderWriter(made, plan)
        for key, tensor in stream:
            writer.write(key, 0, host_bytes(tensor))
            left.remove(key)
        assert not left, f"named_weights does not yield {min(left)}, which weight_shapes announces"
        writer.finish()
        write_files(made, model_files(engine.model_files, adapters=only))

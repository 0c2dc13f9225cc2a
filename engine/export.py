"""A trained engine to a Hugging Face folder, streamed: one tensor in memory at a time, whatever the model's size."""

import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .checkpoint.tensorfile import TensorWriter, fsync_folder, write_json
from .errors import CheckpointError, disk_error

if TYPE_CHECKING:
    from .base import Adapters, BaseEngine

SHARD_BYTES = 5 * 2**30


def export_hf(
    engine: "BaseEngine", folder: Path | str, *, adapters: "Adapters" = "folded", shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write weights, config and tokenizer as transformers (or, for adapters alone, peft) loads them. Collective.

    The folder appears complete or not at all; an existing one is replaced.

    Args:
        engine: initialised.
        folder: to write.
        adapters: `folded` into the weights, or `only` them, in peft's format.
        shard_bytes: size of a file, at most, unless one tensor is larger.

    Raises:
        CheckpointError: there are no adapters to write alone.
    """
    final = Path(folder)
    if final.exists() and not any((final / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise CheckpointError(f"{final} exists and is no exported model; it would be replaced: choose another folder")
    shapes = engine.weight_shapes(adapters=adapters)
    if not shapes:
        raise CheckpointError("the model has no adapters; export adapters='folded'")
    plan = plan_shards(shapes, shard_bytes)
    stem = "adapter_model" if adapters == "only" else "model"
    names = [
        f"{stem}.safetensors" if len(plan) == 1 else f"{stem}-{i + 1:05d}-of-{len(plan):05d}.safetensors"
        for i in range(len(plan))
    ]
    temporary = final.parent / f".tmp-{final.name}-{uuid.uuid4().hex[:8]}"
    main = engine.topology.is_main
    error: Exception | None = None
    with engine.named_weights(adapters=adapters) as stream:
        if main:
            try:
                temporary.mkdir(parents=True)
                for name, part in zip(names, plan, strict=True):
                    with TensorWriter(temporary / name, part) as writer:
                        for key in part:
                            got, tensor = next(stream)
                            assert got == key, f"named_weights yields {got} where weight_shapes announces {key}"
                            writer.write(key, tensor)
            except Exception as e:  # disk full, say: the other ranks wait in the next gather, so the stream goes on
                error = e
    if main and error is None:
        try:
            if len(plan) > 1:
                index = {key: name for name, part in zip(names, plan, strict=True) for key in part}
                total = sum(_size(*entry) for entry in shapes.values())
                write_json(
                    temporary / f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
                )
            engine._save_model_files(temporary)
            _only_what_belongs(temporary, adapters)
            _replace(temporary, final)
        except Exception as e:
            error = e
    if error is not None:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            error = disk_error(str(final), error)
    engine.topology.agree(error)
    return final


def plan_shards(
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], shard_bytes: int
) -> list[dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """Tensors in order, cut into files."""
    plan: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    used = 0
    for name, entry in shapes.items():
        size = _size(*entry)
        if plan[-1] and used + size > shard_bytes:
            plan.append({})
            used = 0
        plan[-1][name] = entry
        used += size
    return plan


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * torch.Size(shape).numel()


def _only_what_belongs(folder: Path, adapters: "Adapters") -> None:
    # A folded model must not look like an adapter to peft, nor an adapter like a model to transformers.
    (folder / ("config.json" if adapters == "only" else "adapter_config.json")).unlink(missing_ok=True)


def _replace(temporary: Path, final: Path) -> None:
    if final.exists():
        old = final.parent / f".del-{final.name}-{uuid.uuid4().hex[:8]}"
        final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old)
    else:
        temporary.rename(final)
    fsync_folder(final.parent)

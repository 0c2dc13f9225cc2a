"""A checkpoint of any engine and layout into a Hugging Face folder, streamed. Adapters are merged in or kept apart."""

import logging
import re
from pathlib import Path
from typing import Literal

from ..engine.checkpoint.hf_folder import SHARD_BYTES, check_target
from ..engine.checkpoint.manifest import Manifest
from ..engine.checkpoint.retention import find_checkpoint
from ..engine.errors import CheckpointError
from ..engine.hf.model_path import fingerprint, resolve_folder
from ..engine.hf.names import PEFT_PREFIX
from .adapters import MergedAdapters
from .plan import Copied, WritePlan, apply, check_dtype, plan_write
from .sources import CheckpointSource, FolderSource
from .streaming import Blocks, Progress

log = logging.getLogger(__name__)

Adapters = Literal["merged", "only"]


def merge(
    checkpoint: Path | str,
    output: Path | str,
    *,
    adapters: Adapters = "merged",
    base: Path | str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
    workers: int | None = None,
    progress: Progress | None = None,
) -> WritePlan:
    """Write a checkpoint as a folder that transformers (or, for adapters alone, peft) loads.

    The folder appears complete or not at all; an exported one of the same name is replaced. Needs memory for a few blocks
    of 16 MiB, whatever the model's size.

    Args:
        checkpoint: its folder or URL, or those of a run, whose last complete one is taken.
        output: folder to write.
        adapters: of a run with LoRA: `merged` into the base model, or `only` them, in peft's format.
        base: the base model of adapters; None for the one that the run names.
        dtype: float32, bfloat16, float16 or float64; None as trained.
        shard_bytes: size of a file, at most, unless one tensor is larger.
        verify: compare what is read with its checksums.
        workers: threads; None for one for each core, 8 at most.
        progress: called with the bytes of each block.

    Returns:
        what was done.

    Raises:
        CheckpointError: incomplete or damaged; or the output is something else, or cannot be written.
    """
    plan = plan_merge(checkpoint, output, adapters=adapters, base=base, dtype=dtype, shard_bytes=shard_bytes, verify=verify)
    apply(plan, workers, progress)
    return plan


def plan_merge(
    checkpoint: Path | str,
    output: Path | str,
    *,
    adapters: Adapters = "merged",
    base: Path | str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
) -> WritePlan:
    """What `merge` would do; reads headers and no tensor."""
    check_dtype(dtype)
    if adapters not in ("merged", "only"):
        raise CheckpointError(f"adapters={adapters}; it must be merged or only")
    check_target(Path(output))
    manifest = find_checkpoint(checkpoint)
    stored = CheckpointSource(manifest, verify=verify)
    files = stored.model_files()
    adapted = any(name.startswith(PEFT_PREFIX) for name in stored.entries)
    if not adapted and adapters == "only":
        raise CheckpointError(
            f"{manifest.store} has no adapters: it was trained without LoRA; leave out adapters=only (--adapters only)"
        )
    if not adapted and base is not None:
        raise CheckpointError(f"{manifest.store} has no adapters that a base, {base}, could be merged with; leave it out")
    source: Blocks
    if not adapted:
        source, entries = Copied(stored), dict(stored.entries)
    elif adapters == "only":
        source, entries = Copied(stored), {n: e for n, e in stored.entries.items() if n.startswith(PEFT_PREFIX)}
    else:
        if manifest.data["model"].get("init") == "random" and base is None:
            raise CheckpointError(
                f"{manifest.store} adapts random weights (model.init=random), which are stored nowhere; take adapters=only "
                "(--adapters only)"
            )
        where = _base_folder(manifest, base)
        log.warning("base model of the adapters: %s", where)
        if Path(output).resolve() == where.resolve():
            raise CheckpointError(f"{output} is the base model itself; choose another folder")
        merged = MergedAdapters(stored, FolderSource(where), files)
        source, entries = merged, merged.entries
    return plan_write(
        str(manifest.store),
        output,
        source,
        entries,
        files,
        dtype=dtype,
        shard_bytes=shard_bytes,
        only_adapters=adapted and adapters == "only",
    )


def _base_folder(manifest: Manifest, base: Path | str | None) -> Path:
    """The base model of a run's adapters.

    Raises:
        CheckpointError: it is not there any more, or another model.
    """
    path = str(base or manifest.data["model"]["path"])
    try:
        folder = resolve_folder(path)
    except Exception as e:  # of many kinds: no network, no such name, no access
        raise CheckpointError(
            f"the base model of {manifest.store}, {path}, is no folder here and cannot be downloaded; name its place as base (--base), "
            f"or take adapters=only ({str(e).splitlines()[0]})"
        ) from e
    expected = manifest.data.get("fingerprint")
    # A name on the Hub stands for itself: a copy of it elsewhere cannot be told.
    if re.fullmatch(r"[0-9a-f]{32}", str(expected)) and expected != (found := fingerprint(str(folder))):
        raise CheckpointError(
            f"{folder} is not the model that {manifest.store} was trained from (fingerprint {found}, not {expected}); give the "
            "right one as base (--base)"
        )
    return folder

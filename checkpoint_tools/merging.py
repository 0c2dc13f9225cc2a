"""Streaming conversion of a checkpoint from any engine and layout into a Hugging Face folder.

LoRA adapters are merged into the base model or written on their own.
"""

import logging
import re
from pathlib import Path
from typing import Literal

from ..engine.checkpoint.hf_folder import SHARD_BYTES, check_target
from ..engine.checkpoint.manifest import CheckpointManifest
from ..engine.checkpoint.retention import find_checkpoint
from ..engine.errors import CheckpointError, first_line
from ..engine.hf.model_path import fingerprint, resolve_folder
from ..engine.hf.names import PEFT_PREFIX
from .adapters import AdapterBlocks, MergedAdapters
from .plan import CopiedBlocks, WritePlan, apply, check_dtype, plan_write
from .sources import CheckpointSource, FolderSource
from .streaming import Blocks, ProgressCallback

log = logging.getLogger(__name__)

AdapterHandling = Literal["merged", "only"]


def merge(
    checkpoint: Path | str,
    output: Path | str,
    *,
    adapters: AdapterHandling = "merged",
    base: Path | str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> WritePlan:
    """Write a checkpoint as a folder that transformers can load (or PEFT, for only adapters).

    The folder appears only when it is complete; an earlier export of the same name is replaced. Merging needs memory for a few
    blocks of 16 MiB, regardless of the size of the model.

    Args:
        checkpoint: The folder or URL of a checkpoint, or of a run, whose last complete checkpoint is used.
        output: The folder to write.
        adapters: How to write LoRA adapters: `merged` into the base model, or `only` the adapters, in PEFT format.
        base: The base model of the adapters; None for the one recorded by the run.
        dtype: The dtype to write: float32, bfloat16, float16 or float64; None for the dtype as trained.
        shard_bytes: The maximum size of a weight file, unless a single tensor is larger.
        verify: Whether to check the data that is read against its checksums.
        workers: The number of threads; None for one per core, at most 8.
        progress: Called with the size of each block in bytes.

    Returns:
        The plan that was carried out.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged, or the output is not an export or cannot be written.
    """
    plan = plan_merge(checkpoint, output, adapters=adapters, base=base, dtype=dtype, shard_bytes=shard_bytes, verify=verify)
    apply(plan, workers, progress)
    return plan


def plan_merge(
    checkpoint: Path | str,
    output: Path | str,
    *,
    adapters: AdapterHandling = "merged",
    base: Path | str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
) -> WritePlan:
    """Return the plan that `merge` would carry out, reading headers but no tensors."""
    check_dtype(dtype)
    if adapters not in ("merged", "only"):
        hint = "; folded is called merged now" if str(adapters) == "folded" else ""
        raise CheckpointError(f"adapters={adapters}; it must be merged or only{hint}")
    # Before the checkpoint is read, so that an output which may not be replaced is reported at once.
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
        raise CheckpointError(f"{manifest.store} has no adapters to merge into the base model {base}; leave out base (--base)")
    source: Blocks
    if not adapted:
        source, entries = CopiedBlocks(stored), dict(stored.entries)
    elif adapters == "only":
        adapter = AdapterBlocks(stored, files)
        source, entries = adapter, adapter.entries
    else:
        if manifest.data["model"].get("init") == "random" and base is None:
            raise CheckpointError(
                f"{manifest.store} adapts random weights (model.init=random), which are not stored anywhere; use "
                "adapters=only (--adapters only)"
            )
        base_folder = _base_folder(manifest, base)
        # A warning, so that it is shown by default: with another base model, the merged weights would be wrong without
        # an error.
        log.warning("base model of the adapters: %s", base_folder)
        # The base model is read while the output is written, and would be replaced by it.
        if Path(output).resolve() == base_folder.resolve():
            raise CheckpointError(f"{output} is the base model itself; choose another folder")
        merged = MergedAdapters(stored, FolderSource(base_folder), files)
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


def _base_folder(manifest: CheckpointManifest, base: Path | str | None) -> Path:
    """Find the base model of a run's adapters.

    Raises:
        CheckpointError: The base model is no longer available, or is a different model.
    """
    path = str(base or manifest.data["model"]["path"])
    try:
        folder = resolve_folder(path)
    except Exception as e:  # the Hub's client may raise anything: no network, unknown name, no access
        raise CheckpointError(
            f"the base model of {manifest.store}, {path}, is not a local folder and cannot be downloaded; set base (--base) "
            f"to its location, or use adapters=only ({first_line(e)})"
        ) from e
    expected = manifest.data.get("fingerprint")
    # Models from the Hub are fingerprinted by name, so a local copy of one cannot be compared.
    if re.fullmatch(r"[0-9a-f]{32}", str(expected)) and expected != (actual := fingerprint(str(folder))):
        raise CheckpointError(
            f"{folder} is not the model that {manifest.store} was trained from (fingerprint {actual}, not {expected}); set "
            "base (--base) to the right one"
        )
    return folder

"""A checkpoint of any engine and layout into a Hugging Face folder, streamed. Adapters are folded in or kept apart."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..engine.boxes import Box
from ..engine.checkpoint.folder import find_checkpoint
from ..engine.checkpoint.hf_folder import (
    ADAPTER_STEM,
    CONFIGS,
    SHARD_BYTES,
    Entry,
    FolderPlan,
    FolderWriter,
    check_target,
    model_files,
    plan_folder,
    whole_folder,
    write_files,
)
from ..engine.checkpoint.manifest import Manifest
from ..engine.errors import CheckpointError, disk_error
from ..engine.hf.names import PEFT_PREFIX
from ..engine.model_path import fingerprint, resolve_folder
from .copying import Blocks, Progress, Room, copy_tensors
from .sources import CheckpointSource, FolderSource, Source

Adapters = Literal["folded", "only"]
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_FLOATS = set(DTYPES.values())


@dataclass(frozen=True, kw_only=True)
class MergePlan:
    """What a merge will do.

    Args:
        checkpoint: to read.
        output: folder to write.
        folder: its weight files.
        files: what stands beside them.
        source: of the tensors.
    """

    checkpoint: str
    output: Path
    folder: FolderPlan
    files: Mapping[str, bytes]
    source: Blocks

    def lines(self) -> list[str]:
        """For people."""
        found = [f"{self.checkpoint} -> {self.output}"]
        for name, part in self.folder.files.items():
            size = sum(_bytes(entry) for entry in part.values())
            kinds = ", ".join(sorted({dtype for dtype, _ in part.values()}))
            found.append(f"  {name}: {len(part)} tensors, {kinds}, {size / 1e9:.3f} GB")
        return [*found, *(f"  {name}: {len(data)} bytes" for name, data in self.files.items())]


def _bytes(entry: Entry) -> int:
    return plan_folder({"": entry}).total_bytes


def merge(
    checkpoint: Path | str,
    output: Path | str,
    *,
    adapters: Adapters = "folded",
    base: Path | str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MergePlan:
    """Write a checkpoint as a folder that transformers (or, for adapters alone, peft) loads.

    The folder appears complete or not at all; an exported one of the same name is replaced. Needs memory for a few blocks
    of 16 MiB, whatever the model's size.

    Args:
        checkpoint: its folder or URL, or those of a run, whose last complete one is taken.
        output: folder to write.
        adapters: of a run with LoRA: `folded` into the base model, or `only` them, in peft's format.
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
    adapters: Adapters = "folded",
    base: Path | str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
) -> MergePlan:
    """What `merge` would do; reads headers and no tensor."""
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype}; it must be one of {', '.join(DTYPES)}")
    if adapters not in ("folded", "only"):
        raise CheckpointError(f"adapters={adapters}; it must be folded or only")
    check_target(Path(output))
    manifest = find_checkpoint(checkpoint)
    stored = CheckpointSource(manifest, verify=verify)
    files = stored.model_files()
    adapted = any(name.startswith(PEFT_PREFIX) for name in stored.entries)
    if not adapted and adapters == "only":
        raise CheckpointError(f"{manifest.store} has no adapters: it was trained without LoRA; leave out adapters=only")
    if not adapted and base is not None:
        raise CheckpointError(f"{manifest.store} has no adapters that a base, {base}, could be merged with; leave it out")
    source: Blocks
    if not adapted:
        source, entries = _Copied(stored), dict(stored.entries)
    elif adapters == "only":
        source, entries = _Copied(stored), {n: e for n, e in stored.entries.items() if n.startswith(PEFT_PREFIX)}
    else:
        folded = Folded(stored, FolderSource(_base_folder(manifest, base)), files)
        source, entries = folded, folded.entries
    if dtype is not None:
        source = _Cast(source, entries)
        entries = {name: (DTYPES[dtype] if kind in _FLOATS else kind, shape) for name, (kind, shape) in entries.items()}
        source.wanted = entries
        files = _with_dtype(files, dtype)
    only = adapted and adapters == "only"
    return MergePlan(
        checkpoint=str(manifest.store),
        output=Path(output),
        folder=plan_folder(entries, shard_bytes, adapters=only),
        files=model_files(files, adapters=only),
        source=source,
    )


def apply(plan: MergePlan, workers: int | None = None, progress: Progress | None = None) -> None:
    """Do what a plan says.

    Raises:
        CheckpointError: damaged, or the disk is full; nothing is left behind.
    """
    count = workers or min(8, len(os.sched_getaffinity(0)))
    try:
        with whole_folder(plan.output) as made:
            with FolderWriter(made, plan.folder) as writer:
                copy_tensors(plan.folder, writer, plan.source, count, progress)
            write_files(made, plan.files)
    except OSError as e:
        raise disk_error(str(plan.output), e) from e


class _Copied:
    """Blocks as they are stored."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def block(self, name: str, part: Box, room: Room) -> Any:
        """See `Blocks`."""
        out = room.take("copied", self._source.entries[name][0], part.length)
        self._source.read(name, part, out)
        return out


class _Cast:
    """Blocks in another number format."""

    def __init__(self, source: Blocks, entries: Mapping[str, Entry]) -> None:
        self._source, self._stored = source, entries
        self.wanted: Mapping[str, Entry] = entries

    def block(self, name: str, part: Box, room: Room) -> Any:
        """See `Blocks`."""
        found = self._source.block(name, part, room)
        was, becomes = self._stored[name][0], self.wanted[name][0]
        if was == becomes:
            return found
        from ..engine.checkpoint.pieces import as_tensor, raw

        out = room.take("cast", becomes, part.length)
        as_tensor(out, becomes).copy_(as_tensor(found, was))
        return raw(as_tensor(out, becomes))


class Folded:
    """The base model's blocks with the adapters' products added, in float32 on the way, as the engines fold them.

    LoRA: Hu et al. 2021, arXiv:2106.09685, equation 3.

    Args:
        adapters: checkpoint of the run.
        base: its base model.
        files: of the checkpoint: peft's settings, and the config that the result will have.

    Raises:
        CheckpointError: an adapter without a layer in the base, or settings that are not the checkpoint's.
    """

    def __init__(self, adapters: CheckpointSource, base: FolderSource, files: Mapping[str, bytes]) -> None:
        self._adapters, self._base = adapters, base
        settings = json.loads(files.get(CONFIGS[ADAPTER_STEM], b"null"))
        if not isinstance(settings, dict):
            raise CheckpointError(f"{adapters.label} has adapters, but no {CONFIGS[ADAPTER_STEM]}")
        unknown = [k for k in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern") if settings.get(k)]
        if unknown:
            raise CheckpointError(f"{adapters.label}: {unknown[0]}={settings[unknown[0]]} is not known to merge")
        self._scale = settings["lora_alpha"] / settings["r"]
        self._transposed = bool(settings.get("fan_in_fan_out"))
        precision = adapters.manifest.data["engine"]["precision"]["params"]
        self._dtype = DTYPES[precision]
        own = {n: e for n, e in adapters.entries.items() if not n.startswith(PEFT_PREFIX)}
        # A value head is trained beside the adapters, in the place of the base's own head.
        heads = {"lm_head.weight", "score.weight"} if "score.weight" in own else set()
        kept = {n: e for n, e in base.entries.items() if n not in heads}
        self._own = set(own)
        self.entries: dict[str, Entry] = {
            **{n: (self._dtype if dtype in _FLOATS else dtype, shape) for n, (dtype, shape) in kept.items()},
            **own,
        }
        self._pairs = {}
        factor = re.compile(rf"{re.escape(PEFT_PREFIX)}(.*)\.lora_A\.weight")
        for name in adapters.entries:
            found = factor.fullmatch(name)
            if found is not None:
                self._pairs[f"{found[1]}.weight"] = (name, name.replace(".lora_A.", ".lora_B."))
        missing = sorted(set(self._pairs) - set(kept))
        if missing:
            raise CheckpointError(
                f"{base.label} has no {missing[0]}, which {adapters.label} adapts ({len(missing)} such layers); give the model that "
                "the run began with"
            )
        self._check_shapes()

    def _check_shapes(self) -> None:
        for name, (down, up) in self._pairs.items():
            shape = self._base.entries[name][1]
            rows, columns = reversed(shape) if self._transposed else shape
            a, b = self._adapters.entries[down][1], self._adapters.entries.get(up, ("", ()))[1]
            if a != (a[0], columns) or b != (rows, a[0]):
                raise CheckpointError(
                    f"{self._base.label}: {name} is {list(shape)}, but its adapter's factors are {list(a)} and {list(b)}; give the "
                    "model that the run began with"
                )

    def block(self, name: str, part: Box, room: Room) -> Any:
        """See `Blocks`."""
        from ..engine.checkpoint.pieces import as_tensor, raw

        if name in self._own:
            out = room.take("own", self._adapters.entries[name][0], part.length)
            self._adapters.read(name, part, out)
            return out
        was, becomes = self._base.entries[name][0], self.entries[name][0]
        stored = room.take("base", was, part.length)
        self._base.read(name, part, stored)
        if name not in self._pairs and was == becomes:
            return stored
        out = as_tensor(room.take("folded", becomes, part.length), becomes)
        # First the format that the run trained in, then the sum: as an engine that folds does.
        out.copy_(as_tensor(stored, was))
        if name in self._pairs:
            out.copy_(out.float() + self._delta(name, part, room))
        return raw(out)

    def _delta(self, name: str, part: Box, room: Room) -> Any:
        """Rows of the product of an adapter's factors."""
        down, up = self._pairs[name]
        rows = slice(part.offset[0], part.offset[0] + part.length[0])
        if self._transposed:
            return (self._factor(up, None, room) @ self._factor(down, None, room)[:, rows] * self._scale).T
        return self._factor(up, rows, room) @ self._factor(down, None, room) * self._scale

    def _factor(self, name: str, rows: slice | None, room: Room) -> Any:
        from ..engine.checkpoint.pieces import as_tensor

        dtype, shape = self._adapters.entries[name]
        part = Box((rows.start if rows else 0, 0), (rows.stop - rows.start if rows else shape[0], shape[1]))
        out = room.take(name[-13:], dtype, part.length)
        self._adapters.read(name, part, out)
        return as_tensor(out, dtype).float()


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
            f"the base model of {manifest.store}, {path}, is no folder here and cannot be downloaded; name its place with base=..., "
            f"or take adapters=only ({e})"
        ) from e
    expected = manifest.data["extra"].get("model", {}).get("fingerprint")
    if expected is not None and expected not in (path, found := fingerprint(str(folder))):
        raise CheckpointError(
            f"{folder} is not the model that {manifest.store} was trained from (fingerprint {found}, not {expected}); give the "
            "right one with base=..."
        )
    return folder


def _with_dtype(files: Mapping[str, bytes], dtype: str) -> dict[str, bytes]:
    """The model's files with another dtype in config.json."""
    found = dict(files)
    name = CONFIGS["model"]
    if name in found:
        config = json.loads(found[name])
        config["dtype"] = dtype
        config.pop("torch_dtype", None)
        found[name] = (json.dumps(config, indent=2) + "\n").encode()
    return found

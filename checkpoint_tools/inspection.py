"""What a checkpoint is, told from its manifest and headers alone. Imports no torch."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..engine.checkpoint.hf_folder import Entry
from ..engine.checkpoint.manifest import Manifest
from ..engine.checkpoint.retention import find_checkpoint, find_root, newest_first
from ..engine.checkpoint.safetensors_io import tensor_bytes
from ..engine.errors import CheckpointError
from ..engine.hf.names import PEFT_PREFIX
from .sources import FolderSource, is_hf_folder, model_config, size_of


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What is known of a checkpoint or a Hugging Face folder.

    Args:
        where: it lies.
        kind: `checkpoint` or `hugging_face`.
        complete: nothing is missing, as far as sizes and the manifest's own checksum tell.
        model: family, architecture and path of the model.
        parameters: numbers in the tensors' values; of adapters alone where the base is not stored.
        bytes: on disk.
        dtypes: by kind (value, exp_avg, exp_avg_sq): number format -> tensors.
        adapters: tensors of adapters.
        step: number of the checkpoint; None for a Hugging Face folder, as are the following.
        backend: engine that saved it.
        layout: axes of more than one rank.
        processes: that saved it.
        optimizer: its name.
        epoch: of the training data, and the position in it.
        also: other checkpoints of the same run, and what is wrong with those that are incomplete.
    """

    where: str
    kind: str
    complete: bool
    model: Mapping[str, Any]
    parameters: int
    bytes: int
    dtypes: Mapping[str, Mapping[str, int]]
    adapters: int
    step: int | None = None
    backend: str | None = None
    layout: Mapping[str, Any] | None = None
    processes: int | None = None
    optimizer: str | None = None
    data: Mapping[str, Any] | None = None
    also: Mapping[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        layout = "".join(f", {axis}={size}".lower() for axis, size in (self.layout or {}).items())
        rows = {
            "complete": "yes, by its files' sizes (verify reads them)" if self.kind == "checkpoint" else None,
            "model": ", ".join(str(v) for v in self.model.values() if v),
            "step": self.step,
            "engine": None
            if self.backend is None
            else f"{self.backend}, {self.processes} {'process' if self.processes == 1 else 'processes'}{layout}",
            "parameters": f"{self.parameters:,}" + (f" in {self.adapters} tensors of adapters" if self.adapters else ""),
            "on disk": size_of(self.bytes),
            **{
                kind: ", ".join(f"{count} tensors {dtype}" for dtype, count in found.items())
                for kind, found in self.dtypes.items()
            },
            "optimizer": self.optimizer,
            "data": None if not self.data else ", ".join(f"{k} {v}" for k, v in self.data.items()),
        }
        found = [self.where, *(f"  {name:12} {value}" for name, value in rows.items() if value is not None)]
        return [*found, *(f"  {'beside it':12} {name}: {what}" for name, what in (self.also or {}).items())]


def inspect(where: Path | str) -> Inspection:
    """Look at a checkpoint, at the last one of a run, or at a Hugging Face folder, without reading tensors.

    Raises:
        CheckpointError: it is none of these, or so incomplete that it says nothing of itself.
    """
    if is_hf_folder(where):
        return _folder(FolderSource(Path(where)))
    root = find_root(where)
    if root is None:
        return _checkpoint(find_checkpoint(where), None)
    found = list(newest_first(root))
    manifest = next((m for _, m in found if isinstance(m, Manifest)), None)
    if manifest is None:
        raise CheckpointError(f"{root} has no complete checkpoint: {'; '.join(str(reason) for _, reason in found)}")
    also = {name: "complete" if isinstance(m, Manifest) else str(m) for name, m in found if m is not manifest}
    return _checkpoint(manifest, also)


def _checkpoint(manifest: Manifest, also: Mapping[str, str] | None) -> Inspection:
    data = manifest.data
    config = model_config(dict(manifest.model_files()))
    kinds: dict[str, dict[str, Entry]] = {}
    for name in manifest.names:
        for kind, found in manifest.kinds(name).items():
            kinds.setdefault(kind, {})[name] = (found.dtype, found.shape)
    layout = {a: n for a, n in data["parallel"].items() if isinstance(n, int) and (n is True or n > 1)}
    loader = data["extra"].get("data")
    return Inspection(
        where=str(manifest.store),
        kind="checkpoint",
        complete=True,
        model={**_model(config), "path": data["model"].get("path")},
        parameters=_parameters(kinds.get("value", {})),
        bytes=sum(entry["bytes"] for entry in data["files"].values()),
        dtypes={kind: dict(Counter(dtype for dtype, _ in found.values())) for kind, found in kinds.items()},
        adapters=sum(name.startswith(PEFT_PREFIX) for name in manifest.names),
        step=manifest.step,
        backend=data["backend"],
        layout=layout,
        processes=data["world_size"],
        optimizer=None if data["optim"] is None else data["optim"]["name"],
        data={k: loader[k] for k in ("epoch", "position") if k in loader} if isinstance(loader, dict) else {},
        also=also,
    )


def _folder(source: FolderSource) -> Inspection:
    config = model_config(source.model_files())
    return Inspection(
        where=source.label,
        kind="hugging_face",
        complete=True,
        model=_model(config),
        parameters=_parameters(source.entries),
        bytes=sum(tensor_bytes(*entry) for entry in source.entries.values()),
        dtypes={"value": dict(Counter(dtype for dtype, _ in source.entries.values()))},
        adapters=sum(name.startswith(PEFT_PREFIX) for name in source.entries),
    )


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    found = config.get("architectures")
    return {"family": config.get("model_type"), "architecture": ", ".join(map(str, found)) if isinstance(found, list) else ""}


def _parameters(entries: Mapping[str, Entry]) -> int:
    return sum(math.prod(shape) for _, shape in entries.values())

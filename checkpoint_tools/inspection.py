"""Description of a checkpoint from only its manifest and headers."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..engine.checkpoint.hf_folder import Entry
from ..engine.checkpoint.manifest import CheckpointManifest
from ..engine.checkpoint.retention import find_checkpoint, find_root, newest_first
from ..engine.checkpoint.safetensors_io import tensor_bytes
from ..engine.errors import CheckpointError
from ..engine.hf.names import PEFT_PREFIX
from .sources import FolderSource, is_hf_folder, model_config, size_of


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The properties of a checkpoint or a Hugging Face folder.

    Args:
        where: The location of the checkpoint or folder.
        kind: Either `checkpoint` or `hugging_face`.
        complete: Whether nothing is missing, judging by file sizes and the manifest's own checksum.
        model: The family, architecture and path of the model.
        parameters: The number of parameters; only those of the adapters if the base model is not stored.
        bytes: The size on disk in bytes.
        dtypes: For each kind (value, exp_avg, exp_avg_sq), the number of tensors by dtype.
        adapters: The number of adapter tensors.
        step: The step number of the checkpoint. None for a Hugging Face folder, like all following fields.
        backend: The engine that saved the checkpoint.
        layout: The parallel axes with more than one rank.
        processes: The number of processes that saved the checkpoint.
        optimizer: The name of the optimizer.
        data: The epoch of the training data and the position in it. For streamed data, the rows before those in use, and the position
            among the samples of the rows in use.
        also: The other checkpoints of the same run, each with `complete` or the reason why it is incomplete.
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
        """Convert the properties to plain data."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Describe the checkpoint for the user, one string per line."""
        layout = "".join(f", {axis}={size}".lower() for axis, size in (self.layout or {}).items())
        rows = {
            "complete": "yes, judging by file sizes (verify reads the files)" if self.kind == "checkpoint" else None,
            "model": ", ".join(str(v) for v in self.model.values() if v),
            "step": self.step,
            "engine": None
            if self.backend is None
            else f"{self.backend}, {self.processes} {'process' if self.processes == 1 else 'processes'}{layout}",
            "parameters": f"{self.parameters:,}" + (f" in {self.adapters} adapter tensors" if self.adapters else ""),
            "on disk": size_of(self.bytes),
            **{
                kind: ", ".join(f"{count} tensors {dtype}" for dtype, count in counts.items())
                for kind, counts in self.dtypes.items()
            },
            "optimizer": self.optimizer,
            "data": self._position(),
        }
        lines = [self.where, *(f"  {name:12} {value}" for name, value in rows.items() if value is not None)]
        return [*lines, *(f"  {'also present':12} {name}: {status}" for name, status in (self.also or {}).items())]

    def _position(self) -> str | None:
        data = self.data or {}
        where = [f"{name} {number}" for name, number in data.items() if name != "rows"]
        after = [f"of the samples after row {data['rows']}"] if "rows" in data else []
        return " ".join([", ".join(where), *after]) or None


def inspect(where: Path | str) -> Inspection:
    """Inspect a checkpoint, the last checkpoint of a run, or a Hugging Face folder, without reading tensors.

    Raises:
        CheckpointError: The path is none of these, or the checkpoint is too incomplete to describe.
    """
    if is_hf_folder(where):
        return _folder(FolderSource(Path(where)))
    root = find_root(where)
    if root is None:
        return _checkpoint(find_checkpoint(where), None)
    # The newest complete one is described, also if newer ones are incomplete; `also` lists these.
    checkpoints = list(newest_first(root))
    manifest = next((m for _, m in checkpoints if isinstance(m, CheckpointManifest)), None)
    if manifest is None:
        raise CheckpointError(f"{root} has no complete checkpoint: {'; '.join(str(reason) for _, reason in checkpoints)}")
    also = {name: "complete" if isinstance(m, CheckpointManifest) else str(m) for name, m in checkpoints if m is not manifest}
    return _checkpoint(manifest, also)


def _checkpoint(manifest: CheckpointManifest, others: Mapping[str, str] | None) -> Inspection:
    data = manifest.data
    config = model_config(dict(manifest.model_files()))
    kinds: dict[str, dict[str, Entry]] = {}
    for name in manifest.names:
        for kind, tensor in manifest.kinds(name).items():
            kinds.setdefault(kind, {})[name] = (tensor.dtype, tensor.shape)
    # In Python, True is an int that is not above 1.
    layout = {axis: size for axis, size in data["parallel"].items() if isinstance(size, int) and (size is True or size > 1)}
    loader = data["extra"].get("data")
    return Inspection(
        where=str(manifest.store),
        kind="checkpoint",
        complete=True,
        model={**_model(config), "path": data["model"].get("path")},
        parameters=_parameters(kinds.get("value", {})),
        bytes=sum(entry["bytes"] for entry in data["files"].values()),
        dtypes={kind: dict(Counter(dtype for dtype, _ in entries.values())) for kind, entries in kinds.items()},
        adapters=sum(name.startswith(PEFT_PREFIX) for name in manifest.names),
        step=manifest.step,
        backend=data["backend"],
        layout=layout,
        processes=data["world_size"],
        optimizer=None if data["optim"] is None else data["optim"]["name"],
        data={k: loader[k] for k in ("epoch", "rows", "position") if k in loader} if isinstance(loader, dict) else {},
        also=others,
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
    architectures = config.get("architectures")
    return {
        "family": config.get("model_type"),
        "architecture": ", ".join(map(str, architectures)) if isinstance(architectures, list) else "",
    }


def _parameters(entries: Mapping[str, Entry]) -> int:
    return sum(math.prod(shape) for _, shape in entries.values())

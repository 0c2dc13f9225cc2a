"""Checkpoints of one of several adapters, in the format of a run that trains only that adapter (`model.lora`).

A run of any backend with the same adapter settings can resume from them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .adapters.config import AdapterConfig
from .adapters.slot import AdaptedLayer, AdapterSlot
from .checkpoint.hf_folder import ADAPTER_STEM, CONFIGS
from .checkpoint.load import fill, load_state
from .checkpoint.local_shards import LocalShard
from .checkpoint.manifest import CheckpointManifest
from .checkpoint.save import take_snapshot, write_snapshot
from .checkpoint.storage import open_store
from .config import OptimConfig
from .errors import CheckpointError
from .hf.adapter_settings import peft_settings, stored_tensors

if TYPE_CHECKING:
    from .base import BaseEngine

ADAPTER = "adapter"
"""The key of an adapter's settings in the `extra` state of its checkpoint."""


def save_adapter(engine: "BaseEngine", slot: AdapterSlot, root: Path | str, extra: Mapping[str, Any] | None = None) -> str:
    """Write the checkpoint `root/step-XXXXXXXX` of an adapter, including its moments, atomically. Collective.

    Accumulated gradients that no optimizer step has used are not saved.

    Args:
        engine: The engine.
        slot: The adapter.
        root: The folder for checkpoints of this adapter, or its URL.
        extra: JSON-serializable state of the caller.

    Returns:
        The folder of the checkpoint, or its URL.

    Raises:
        CheckpointError: The checkpoint cannot be written; earlier checkpoints are unchanged.
    """
    # Every rank holds the full adapter, so one rank writes it.
    shards = list(_shards(slot, engine.topology.is_main))
    # As in the checkpoint of a run with `model.lora`, the model settings describe the adapter.
    model = asdict(engine.model_config)
    # The experts of a layer are adapted together, under the name of their module.
    targets = dict.fromkeys(one.name if one.experts is None else one.name.rpartition(".")[0] for one in slot.layers)
    model |= {
        "max_adapters": 0,
        "lora": {**model["lora"], "rank": slot.config.rank, "alpha": slot.config.alpha, "targets": list(targets)},
    }
    state = {
        "backend": engine.config.backend,
        "engine": asdict(engine.config),
        "model": model,
        "fingerprint": engine.model_fingerprint,
        "optim": asdict(OptimConfig()),
        "schedule": {"step": slot.step_count},
        "optimizer": {"step": {shard.name: float(slot.step_count) for shard in shards}},
        "extra": {**(extra or {}), ADAPTER: asdict(slot.config)},
    }
    files = {CONFIGS[ADAPTER_STEM]: peft_settings(slot, engine.model_config.path, transposed=engine.transposed_weights)}
    snapshot = take_snapshot(slot.step_count, shards, state, lambda: {**engine.model_files, **files})
    return write_snapshot(snapshot, open_store(root), engine.topology, engine.topology.host)


def adapter_config_of(folder: Path | str) -> AdapterConfig:
    """Return the settings of the adapter in a checkpoint. Not collective.

    Raises:
        CheckpointError: The checkpoint is damaged, or was not written by `save_adapter`.
    """
    return _config_of(CheckpointManifest.read(open_store(folder)), folder)


def check_adapter(folder: Path | str, *, path: str, fingerprint: str) -> int:
    """Check that a checkpoint belongs to an adapter of a model, and return its number of optimizer steps. Not collective.

    Args:
        folder: The folder of the checkpoint, or its URL.
        path: The path of the model, for messages.
        fingerprint: The fingerprint of the model.

    Raises:
        CheckpointError: The checkpoint is damaged, belongs to another model, or was not written by `save_adapter`.
    """
    manifest = CheckpointManifest.read(open_store(folder))
    _check_model(manifest, folder, path, fingerprint)
    _config_of(manifest, folder)
    return int(manifest.data["schedule"]["step"])


def read_adapter(
    folder: Path | str, layers: Sequence[AdaptedLayer], device: torch.device, *, path: str, fingerprint: str
) -> AdapterSlot:
    """Return an adapter with the factors of a checkpoint, without its moments. Not collective.

    Args:
        folder: The folder of the checkpoint, or its URL.
        layers: The layers of the model that can be adapted.
        device: The device of the adapter.
        path: The path of the model, for messages.
        fingerprint: The fingerprint of the model.

    Raises:
        CheckpointError: The checkpoint is damaged, belongs to another model, or was not written by `save_adapter`.
    """
    manifest = CheckpointManifest.read(open_store(folder))
    _check_model(manifest, folder, path, fingerprint)
    slot = AdapterSlot(_config_of(manifest, folder), layers, device)
    fill(manifest, [shard for shard in _shards(slot, True) if shard.kind == "value"], manifest.tensor_files(verify=True))
    slot.loaded(int(manifest.data["schedule"]["step"]), moments=False)
    return slot


def _config_of(manifest: CheckpointManifest, folder: Path | str) -> AdapterConfig:
    settings = manifest.data["extra"].get(ADAPTER)
    try:
        return AdapterConfig(**{**settings, "targets": tuple(settings["targets"])})
    except TypeError as e:
        raise CheckpointError(
            f"{folder} has no valid settings of an adapter ({e}); use a checkpoint that was saved with model.max_adapters"
        ) from e


def load_adapter(
    engine: "BaseEngine", slot: AdapterSlot, folder: Path | str, *, optimizer: bool = True, verify: bool = True
) -> Mapping[str, Any]:
    """Load a checkpoint of an adapter with the same rank and targets. Gradients are dropped. Collective.

    Args:
        engine: The engine.
        slot: The adapter to load into.
        folder: The folder of the checkpoint, or its URL.
        optimizer: Whether to load the moments and the step count; otherwise they are reset.
        verify: Whether to verify the checksums of the data that is read.

    Returns:
        The `extra` state that was saved with it.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged, or belongs to another model or to an adapter with other settings. The adapter
            is unchanged, unless the damage is only detected while the tensors are read.
    """
    store = open_store(folder)
    with engine.topology.collective_errors():
        saved_manifest = CheckpointManifest.read(store)
        data = saved_manifest.data
        _check_model(saved_manifest, folder, engine.model_config.path, engine.model_fingerprint)
        saved = data["model"].get("lora") or {}
        if saved.get("alpha") != slot.config.alpha:
            raise CheckpointError(
                f"{folder} was saved with alpha={saved.get('alpha')}, but the adapter has alpha={slot.config.alpha}; create the adapter with "
                "the alpha of the checkpoint"
            )
    kinds = ("value", "exp_avg", "exp_avg_sq") if optimizer else ("value",)
    manifest = load_state(
        store,
        topology=engine.topology,
        local_shards=lambda: (shard for shard in _shards(slot, True) if shard.kind in kinds),
        optimizer="adamw" if optimizer else None,
        verify=verify,
    )
    slot.loaded(int(manifest.data["schedule"]["step"]) if optimizer else 0, moments=optimizer)
    extra: Mapping[str, Any] = manifest.data["extra"]
    return extra


def _check_model(manifest: CheckpointManifest, folder: Path | str, path: str, fingerprint: str) -> None:
    data = manifest.data
    if data.get("fingerprint") not in (None, fingerprint):
        raise CheckpointError(
            f"{folder} is a checkpoint of an adapter of another model ({data['model'].get('path')}), not of model.path={path}; set model.path to "
            "the model that the adapter was trained on"
        )


def _shards(slot: AdapterSlot, owned: bool) -> Iterator[LocalShard]:
    for name, kind, tensor in stored_tensors(slot):
        yield LocalShard(kind=kind, name=name, shape=tuple(tensor.shape), offset=(0,) * tensor.dim(), data=tensor, owned=owned)

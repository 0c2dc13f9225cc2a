"""Checkpoints of an engine: taking snapshots of its state, saving and loading. Shared by all backends."""

import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .backend import Backend
from .checkpoint.load import RestoredState, load_state, restore_random_state
from .checkpoint.local_shards import LocalShard
from .checkpoint.save import HostCopies, Snapshot, take_snapshot, write_snapshot
from .checkpoint.storage import open_store
from .config import EngineConfig, ModelConfig, OptimConfig
from .errors import ConfigError, ModelError
from .hf.model_path import fingerprint
from .offload import PARTS, Offloader

EngineMode = Literal["train", "eval", "save"]


class CheckpointableEngine(Backend):
    """The part of `BaseEngine` that saves and loads checkpoints, based on the local shards that a backend yields."""

    model_config: ModelConfig
    config: EngineConfig
    optim_config: OptimConfig | None
    step: int
    _mode: EngineMode | None
    _offloader: Offloader
    _incomplete: str
    """Why the weights are not a complete set; empty if they are."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop the gradients."""

    def snapshot(self, step: int, extra: Mapping[str, Any] | None, copies: HostCopies) -> Snapshot:
        """Copy this rank's part of a checkpoint of the current state. The copy does not change while training continues.

        Args:
            step: The step of the checkpoint.
            extra: The JSON-serializable state of the trainer and the data loader.
            copies: The host buffers for the copies, which are reused from one save to the next.
        """
        with self._offloader.on_device(PARTS):
            return take_snapshot(step, self.local_shards(), self._manifest_fields(extra), lambda: self.model_files, copies)

    @contextmanager
    def live_snapshot(self, step: int, extra: Mapping[str, Any] | None = None) -> Iterator[Snapshot]:
        """Yield a snapshot of live memory, without copies. Nothing can be trained or offloaded until the `with` block ends.

        Args:
            step: The step of the checkpoint.
            extra: The JSON-serializable state of the trainer and the data loader.

        Raises:
            ConfigError: The engine is in a mode.
        """
        if self._mode is not None:
            raise ConfigError(f"live_snapshot() inside {self._mode}_mode(); leave the mode first")
        with self._offloader.on_device(PARTS):
            self._mode = "save"
            try:
                yield take_snapshot(step, self.local_shards(), self._manifest_fields(extra), lambda: self.model_files, None)
            finally:
                self._mode = None

    def _manifest_fields(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "backend": self.config.backend,
            "engine": asdict(self.config),
            "model": asdict(self.model_config),
            "fingerprint": self.model_fingerprint,
            "optim": None if self.optim_config is None else asdict(self.optim_config),
            "schedule": {"step": self.step},
            "optimizer": None if self.optim_config is None else self.optimizer_scalars(),
            "extra": dict(extra or {}),
        }

    @cached_property
    def model_fingerprint(self) -> str:
        """The fingerprint of the model that training started from. It must match when resuming a run or merging adapters."""
        return fingerprint(self.model_config.path)

    @cached_property
    def model_files(self) -> Mapping[str, bytes]:
        """The config, generation config and tokenizer files. They do not change, so transformers writes them only once."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_model_files(Path(folder))
            files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
            return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}

    def save_checkpoint(self, root: Path | str, step: int, extra: Mapping[str, Any] | None = None) -> str:
        """Write the checkpoint `root/step-XXXXXXXX` atomically. `CheckpointManager` saves in the background instead.

        Args:
            root: The folder of all checkpoints of a run, or its URL.
            step: The step of the checkpoint.
            extra: The JSON-serializable state of the trainer and the data loader.

        Returns:
            The folder of the checkpoint, or its URL.

        Raises:
            CheckpointError: The checkpoint cannot be written; earlier checkpoints are unchanged.
        """
        with self.live_snapshot(step, extra) as snapshot:
            return write_snapshot(snapshot, open_store(root), self.topology, self.topology.host)

    def load_checkpoint(self, folder: Path | str, *, verify: bool = True) -> RestoredState:
        """Load a checkpoint that any backend saved in any layout. Each rank reads only the slices that it needs.

        Args:
            folder: The folder of the checkpoint, or its URL.
            verify: Whether to verify the checksums of the data that is read.

        Returns:
            The restored state that does not belong to the engine.

        Raises:
            CheckpointError: The checkpoint is incomplete, damaged, or of another model. The engine's state is then unchanged,
                unless the damage is only detected while reading.
        """
        optimizer = None if self.optim_config is None else self.optim_config.name
        with self._offloader.on_device(PARTS):
            manifest = load_state(
                open_store(folder), topology=self.topology, local_shards=self.local_shards, optimizer=optimizer, verify=verify
            )
            self.restore_optimizer(None if optimizer is None else manifest.data["optimizer"])
            self.zero_grad()
        self._incomplete = ""
        self.step = manifest.data["schedule"]["step"]
        same_layout = restore_random_state(manifest, self.topology, self.config.seed, self.step)
        return RestoredState(
            step=manifest.step,
            extra=manifest.data["extra"],
            same_layout=same_layout,
            model=manifest.data["model"].get("path"),
            fingerprint=manifest.data.get("fingerprint"),
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, eta: float = 1.0) -> None:
        """Load full tensors under Hugging Face names, as `named_weights` of another engine streams them. Collective.

        The optimizer keeps its state. Until a complete set has been loaded, the engine refuses to compute.

        Args:
            weights: The names and tensors, the same on all ranks.
            eta: The weight of the new tensors in a moving average: eta x new + (1 - eta) x current. A small one needs parameters of
                32 bits (`engine.precision.params`): in 16 bits small changes are rounded away.

        Raises:
            ConfigError: `eta` is not between 0 and 1, the engine is in a mode, or its model has adapters.
            ModelError: A tensor is unknown, has another shape, or is missing.
        """
        if not 0 <= eta <= 1:
            raise ConfigError(f"eta={eta}; the weight of the new tensors must be between 0 and 1")
        if self._mode is not None:
            raise ConfigError(f"load_weights() inside {self._mode}_mode(); leave the mode first")
        if self.model_config.lora.rank:
            raise ConfigError(
                "this engine trains adapters, so full weights cannot be loaded into it; load a checkpoint instead"
            )
        left = {name: shape for name, (_, shape) in self.weight_shapes().items()}
        with self._offloader.on_device(PARTS), torch.no_grad():
            shards: dict[str, list[LocalShard]] = {}
            for shard in self.local_shards():
                if shard.kind == "value":
                    shards.setdefault(shard.name, []).append(shard)
            self._incomplete = "a load of weights was not finished"
            for name, tensor in weights:
                if name not in left:
                    raise ModelError(
                        f"the weights have {name}, which the model does not have or has already; it is another model"
                    )
                if tuple(tensor.shape) != left[name]:
                    raise ModelError(
                        f"{name} is {list(tensor.shape)}, but {list(left[name])} in the model; it is another model"
                    )
                del left[name]
                for shard in shards.get(name, ()):
                    _mix(shard, tensor, eta)
            if left:
                raise ModelError(
                    f"the weights lack {len(left)} tensors, including {', '.join(list(left)[:3])}; stream all of them"
                )
            # As after a checkpoint: what is derived from the values is brought up to date.
            self.restore_optimizer(None if self.optim_config is None else self.optimizer_scalars())
        self._incomplete = ""


def _mix(shard: LocalShard, tensor: Tensor, eta: float) -> None:
    part = tensor[shard.box.within((0,) * tensor.dim())] if shard.offset else tensor
    new = part.to(shard.data.device)
    if eta == 1 or not shard.data.is_floating_point():
        shard.data.copy_(new)
    else:
        # The sum in 32 bits; what is kept of it has the precision of the parameters.
        wide = torch.promote_types(shard.data.dtype, torch.float32)
        shard.data.copy_(torch.lerp(shard.data.to(wide), new.to(wide), eta))

"""The checkpoints of an engine: snapshots of its state, saving and loading, the same for every backend."""

import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from .backend import Backend
from .checkpoint.load import RestoredState, load_state, restore_random_state
from .checkpoint.save import HostCopies, Snapshot, take_snapshot, write_snapshot
from .checkpoint.storage import open_store
from .config import EngineConfig, ModelConfig, OptimConfig
from .errors import ConfigError
from .hf.model_path import fingerprint
from .offload import PARTS, Offloader

Mode = Literal["train", "eval", "save"]


class CheckpointableEngine(Backend):
    """The part of `BaseEngine` that saves and loads, from the local shards that a backend yields."""

    model_config: ModelConfig
    config: EngineConfig
    optim_config: OptimConfig | None
    step: int
    _mode: Mode | None
    _offloader: Offloader

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop the gradients."""

    def snapshot(self, step: int, extra: Mapping[str, Any] | None, copies: HostCopies) -> Snapshot:
        """This rank's part of a checkpoint of the state as it is, in copies: it stays what it is while training goes on.

        Args:
            step: its number.
            extra: JSON-able state of the trainer and the loader.
            copies: room for them, kept from one save to the next.
        """
        with self._offloader.on_device(PARTS):
            return take_snapshot(step, self._local_shards(), self._manifest_fields(extra), lambda: self.model_files, copies)

    @contextmanager
    def live_snapshot(self, step: int, extra: Mapping[str, Any] | None = None) -> Iterator[Snapshot]:
        """The same without copies, of live memory: meanwhile nothing is trained, and nothing leaves the device."""
        if self._mode is not None:
            raise ConfigError(f"live_snapshot() inside {self._mode}_mode(); leave the mode first")
        with self._offloader.on_device(PARTS):
            self._mode = "save"
            try:
                yield take_snapshot(step, self._local_shards(), self._manifest_fields(extra), lambda: self.model_files, None)
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
            "optimizer": None if self.optim_config is None else self._optimizer_scalars(),
            "extra": dict(extra or {}),
        }

    @cached_property
    def model_fingerprint(self) -> str:
        """The fingerprint of the model that training began with: a resumed run and a merge of adapters must have the same."""
        return fingerprint(self.model_config.path)

    @cached_property
    def model_files(self) -> Mapping[str, bytes]:
        """Config, generation config and tokenizer, which do not change: read back once from what transformers writes."""
        with tempfile.TemporaryDirectory() as folder:
            self._save_model_files(Path(folder))
            files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
            return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}

    def save_checkpoint(self, root: Path | str, step: int, extra: Mapping[str, Any] | None = None) -> str:
        """Write `root/step-XXXXXXXX`, complete or not at all; see `CheckpointManager` for saving in the background.

        Args:
            root: folder of all checkpoints of a run, or its URL.
            step: its number.
            extra: JSON-able state of the trainer and the loader.

        Returns:
            the folder, or its URL.

        Raises:
            CheckpointError: it cannot be written; those saved before are untouched.
        """
        with self.live_snapshot(step, extra) as snapshot:
            return write_snapshot(snapshot, open_store(root), self.topology, self.topology.host)

    def load_checkpoint(self, folder: Path | str, *, verify: bool = True) -> RestoredState:
        """Take over a checkpoint of any layout and engine: each rank reads the slices it needs.

        Args:
            folder: of the checkpoint, or its URL.
            verify: compare what is read with its checksums.

        Raises:
            CheckpointError: incomplete, damaged, or of another model; nothing has been changed then, unless the damage
                shows only while reading.
        """
        optimizer = None if self.optim_config is None else self.optim_config.name
        with self._offloader.on_device(PARTS):
            manifest = load_state(
                open_store(folder), topology=self.topology, pieces=self._local_shards, optimizer=optimizer, verify=verify
            )
            self._restore_optimizer(None if optimizer is None else manifest.data["optimizer"])
            self.zero_grad()
        self.step = manifest.data["schedule"]["step"]
        same = restore_random_state(manifest, self.topology, self.config.seed, self.step)
        return RestoredState(
            step=manifest.step,
            extra=manifest.data["extra"],
            same_layout=same,
            model=manifest.data["model"].get("path"),
            fingerprint=manifest.data.get("fingerprint"),
        )

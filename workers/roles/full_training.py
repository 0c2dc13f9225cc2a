"""The role that trains all weights of one model, as a training service needs it, and evaluates snapshots of the model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from ...engine.adapters.slot import AdapterStep
from ...engine.base import BaseEngine
from ...engine.checkpoint.storage import MANIFEST
from ...engine.config import OptimConfig
from ...engine.errors import ConfigError
from ...engine.export import export_hf
from ...engine.full_trainer import FullWeightTrainer
from ...engine.hf.weights import stored_weights
from ...engine.registry import engine_class
from .adapters import AdapterReply, AdapterRequest, compute_requests
from .base import Worker, WorkerConfig
from .dispatch import register


class FullTrainingWorker(Worker):
    """A model whose weights are all trained. The gradients of calls accumulate until an optimizer step, which has its own settings.

    Each time a model is created, it starts with the weights of `model.path`. Snapshots and the weights of `model.path` themselves (under the
    name None) can be evaluated at the same time; each has an engine without an optimizer. All methods take the same arguments on all ranks.

    Args:
        config: The configuration of the role.
        ranks: The global ranks that run its engine; None uses all ranks.
    """

    trainable: ClassVar[bool] = True

    def __init__(self, config: WorkerConfig, ranks: Sequence[int] | None = None) -> None:
        super().__init__(config, ranks)
        self._ranks = ranks
        self._trainer: FullWeightTrainer | None = None
        self._is_fresh = True
        """Whether the engine has the weights of `model.path` and no moments."""
        self._evaluated: dict[str | None, FullWeightTrainer] = {}

    @register("all")
    def create_model(self, name: str) -> None:
        """Create a model with the weights of `model.path`.

        Args:
            name: The name of the model.

        Raises:
            ConfigError: Another model is being trained.
        """
        if self._trainer is not None:
            raise ConfigError(f"the model {self._trainer.name!r} is being trained; drop it before creating {name!r}")
        self._renew()
        self._trainer, self._is_fresh = FullWeightTrainer(self.engine, name), False

    def _renew(self) -> None:
        """Rebuild the engine, unless it still has the weights of `model.path` and no moments."""
        if self._is_fresh:
            return
        # Closed first, so that the gradients and moments of two engines are never in memory at the same time.
        self.engine.close()
        self.engine = self._new_engine(self.config)
        self._is_fresh = True

    def _new_engine(self, config: WorkerConfig) -> BaseEngine:
        kind = engine_class(config.engine.backend)
        return kind(model=config.model, engine=config.engine, optim=config.optim, ranks=self._ranks).initialize()

    @register("all")
    def drop_model(self, name: str) -> None:
        """Drop the model in training, or free the engine of a snapshot.

        The memory of the model in training stays in use until the next model is created.

        Raises:
            ConfigError: There is no model or snapshot with this name.
        """
        if name in self._evaluated:
            self._evaluated.pop(name).engine.close()
        elif self._trainer is not None and self._trainer.name == name:
            # The engine is not closed here: the next `create_model` rebuilds it.
            self._trainer = None
        else:
            raise ConfigError(f"there is no model {name!r} to drop; there are {', '.join(self.model_names()) or 'none'}")

    @register("all")
    def model_names(self) -> list[str]:
        """Return the name of the model in training, if there is one, and the names of the snapshots."""
        trained = [] if self._trainer is None or self._trainer.name is None else [self._trainer.name]
        return [*trained, *(name for name in self._evaluated if name is not None)]

    @register("all", changes_weights=True)
    def forward_backward(self, requests: Sequence[AdapterRequest]) -> list[AdapterReply]:
        """Compute the losses of requests, and add their gradients to those of the model; see `FullWeightTrainer`.

        Args:
            requests: The requests; `adapter` is the name of the model or of a snapshot, or None for the weights of `model.path`.

        Returns:
            The reply to each request.
        """
        replies: dict[int, AdapterReply] = {}
        # All names are looked up first, so that an unknown name is an error before any gradient changes. All ranks iterate in
        # the same order.
        models = {name: self._model(name) for name in dict.fromkeys(request.adapter for request in requests)}
        # Each name has its own engine, so only requests with the same name can share passes.
        for name, model in models.items():
            numbers = [number for number, request in enumerate(requests) if request.adapter == name]
            computed = compute_requests(model, [requests[number] for number in numbers])
            replies |= dict(zip(numbers, computed, strict=True))
        return [replies[number] for number in range(len(requests))]

    def _model(self, name: str | None) -> FullWeightTrainer:
        if self._trainer is not None and self._trainer.name == name:
            return self._trainer
        # The weights of `model.path` are loaded on first use, because many services never evaluate them.
        if name is None and None not in self._evaluated:
            self.load_snapshot(None, self.config.model.path)
        if name not in self._evaluated:
            raise ConfigError(f"there is no model {name!r}; there are {', '.join(self.model_names()) or 'none'}")
        return self._evaluated[name]

    @register("all", changes_weights=True)
    def optim_step(self, name: str, optim: OptimConfig) -> AdapterStep:
        """Run an optimizer step with the gradients accumulated since the last one; see `FullWeightTrainer.optim_step`.

        Raises:
            ConfigError: There is no such model, or the optimizer is not AdamW.
            NonFiniteError: The gradient is not finite. It was dropped, and the model is unchanged.
        """
        return self._trained(name).optim_step(optim)

    def _trained(self, name: str) -> FullWeightTrainer:
        if self._trainer is None or self._trainer.name != name:
            raise ConfigError(
                f"there is no model {name!r} in training; create or load it first (models and snapshots: {', '.join(self.model_names()) or 'none'})"
            )
        return self._trainer

    @register("all")
    def save_model(self, name: str, root: str) -> str:
        """Write the checkpoint `root/step-XXXXXXXX` of the model, with its moments, and return its folder."""
        engine = self._trained(name).engine
        return engine.save_checkpoint(root, engine.step)

    @register("all")
    def export_model(self, name: str, folder: str) -> str:
        """Write the model in Hugging Face format, and return its folder; see `engine.export.export_hf`."""
        return str(export_hf(self._trained(name).engine, folder))

    @register("all", changes_weights=True)
    def load_model(self, name: str, folder: str, *, optimizer: bool = True) -> None:
        """Load a checkpoint, or a folder in Hugging Face format, into the model. If there is no model, it is created.

        Args:
            name: The name of the model.
            folder: The folder of the checkpoint, or its URL; or a folder in Hugging Face format.
            optimizer: Whether to load the moments and the step count as well; otherwise they start from zero.

        Raises:
            ConfigError: Another model is being trained, or `optimizer` is true for a folder in Hugging Face format, which has no moments.
            CheckpointError, ModelError: The folder is damaged, or belongs to another model. The model is dropped.
        """
        is_exported = Path(folder).is_dir() and not (Path(folder) / MANIFEST).exists()
        if is_exported and optimizer:
            raise ConfigError(
                f"{folder} has weights but no optimizer moments, because it was saved for sampling; load it with optimizer=False, or load a "
                "checkpoint of save_state"
            )
        # The model is dropped, so that `create_model` rebuilds the engine: if `optimizer` is false, no moments and no step
        # count may remain.
        if self._trainer is not None and self._trainer.name == name:
            self._trainer = None
        self.create_model(name)
        try:
            if is_exported:
                self.engine.load_weights(stored_weights(folder))
            else:
                self.engine.load_checkpoint(folder, optimizer=optimizer)
        except BaseException:
            # The weights may be partly loaded, so the model must not be trained further.
            self._trainer = None
            raise

    @register("all")
    def load_snapshot(self, name: str | None, folder: str) -> None:
        """Load a folder in Hugging Face format into an engine without an optimizer, which then evaluates calls with this name.

        Args:
            name: The name of the snapshot; None for the weights of `model.path`.
            folder: The folder.
        """
        if name in self._evaluated:
            self._evaluated.pop(name).engine.close()
        # Without optimizer settings, the engine allocates neither gradients nor moments.
        config = replace(self.config, model=replace(self.config.model, path=folder), optim=None)
        self._evaluated[name] = FullWeightTrainer(self._new_engine(config), name)

    def close(self) -> None:
        """Free all engines."""
        for trainer in self._evaluated.values():
            trainer.engine.close()
        self._evaluated.clear()
        super().close()

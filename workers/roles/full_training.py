"""The role that trains all weights of one model by calls, and evaluates snapshots of it."""

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
from ...engine.full_trainer import FullTrainer
from ...engine.hf.weights import stored_weights
from ...engine.registry import engine_class
from .adapters import AdapterReply, AdapterRequest, compute_requests
from .base import Worker, WorkerConfig
from .dispatch import register


class FullTrainingWorker(Worker):
    """A model whose weights are all trained, by calls whose gradients add up until an optimizer step with settings of its own.

    The model begins with the weights of `model.path` each time it is created. Beside it, snapshots are evaluated, each by an engine without
    an optimizer, and the weights of `model.path` as the model None. All methods take the same arguments on all ranks.

    Args:
        config: The configuration of the role.
        ranks: The global ranks that run its engine; None uses all ranks.
    """

    trainable: ClassVar[bool] = True

    def __init__(self, config: WorkerConfig, ranks: Sequence[int] | None = None) -> None:
        super().__init__(config, ranks)
        self._ranks = ranks
        self._trainer: FullTrainer | None = None
        self._is_fresh = True
        """Whether the engine has the weights of `model.path` and no moments."""
        self._evaluated: dict[str | None, FullTrainer] = {}

    @register("all")
    def create_model(self, name: str) -> None:
        """Begin with the weights of `model.path`.

        Raises:
            ConfigError: There is a model already.
        """
        if self._trainer is not None:
            raise ConfigError(f"the model {self._trainer.name!r} is being trained; drop it before {name!r} is created")
        self._renew()
        self._trainer, self._is_fresh = FullTrainer(self.engine, name), False

    def _renew(self) -> None:
        """Build the engine again, unless it is as new."""
        if self._is_fresh:
            return
        # Closed before the new one is built, so that memory never holds the gradients and moments of two engines.
        self.engine.close()
        self.engine = self._new_engine(self.config)
        self._is_fresh = True

    def _new_engine(self, config: WorkerConfig) -> BaseEngine:
        kind = engine_class(config.engine.backend)
        return kind(model=config.model, engine=config.engine, optim=config.optim, ranks=self._ranks).initialize()

    @register("all")
    def drop_model(self, name: str) -> None:
        """Free a model's name, or the engine of a snapshot.

        Raises:
            ConfigError: There is none with this name.
        """
        if name in self._evaluated:
            self._evaluated.pop(name).engine.close()
        elif self._trainer is not None and self._trainer.name == name:
            # The engine stays as it is: the next `create_model` builds it again. Its memory is in use until then.
            self._trainer = None
        else:
            raise ConfigError(f"there is no model {name!r} to drop; there are {', '.join(self.model_names()) or 'none'}")

    @register("all")
    def model_names(self) -> list[str]:
        """Return the name of the model that is trained, if there is one, and those of snapshots."""
        trained = [] if self._trainer is None or self._trainer.name is None else [self._trainer.name]
        return [*trained, *(name for name in self._evaluated if name is not None)]

    @register("all", changes_weights=True)
    def forward_backward(self, requests: Sequence[AdapterRequest]) -> list[AdapterReply]:
        """Compute the losses of requests, and add their gradients to those of the model; see `FullTrainer`.

        Args:
            requests: The requests; `adapter` is the name of the model or of a snapshot, and None stands for the weights of `model.path`.

        Returns:
            The reply to each request.
        """
        replies: dict[int, AdapterReply] = {}
        # All names first: an error must not come after gradients were added. All ranks iterate in the same order.
        models = {name: self._model(name) for name in dict.fromkeys(request.adapter for request in requests)}
        # Each name has an engine of its own, so only requests of one name can share passes.
        for name, model in models.items():
            numbers = [number for number, request in enumerate(requests) if request.adapter == name]
            computed = compute_requests(model, [requests[number] for number in numbers])
            replies |= dict(zip(numbers, computed, strict=True))
        return [replies[number] for number in range(len(requests))]

    def _model(self, name: str | None) -> FullTrainer:
        if self._trainer is not None and self._trainer.name == name:
            return self._trainer
        # Loaded on first use: a service that is never asked about the model's own weights does not pay for another copy
        # of them.
        if name is None and None not in self._evaluated:
            self.load_snapshot(None, self.config.model.path)
        if name not in self._evaluated:
            raise ConfigError(f"there is no model {name!r}; there are {', '.join(self.model_names()) or 'none'}")
        return self._evaluated[name]

    @register("all", changes_weights=True)
    def optim_step(self, name: str, optim: OptimConfig) -> AdapterStep:
        """Make an optimizer step with the gradients that have added up since the last one; see `FullTrainer.optim_step`.

        Raises:
            ConfigError: There is no such model, or the optimizer is not AdamW.
            NonFiniteError: The gradient is not finite. It was dropped, and the model is unchanged.
        """
        return self._trained(name).optim_step(optim)

    def _trained(self, name: str) -> FullTrainer:
        if self._trainer is None or self._trainer.name != name:
            trained = "no model is" if self._trainer is None else f"{self._trainer.name!r} is"
            raise ConfigError(f"there is no model {name!r} that is trained ({trained}); call create_model({name!r}) first")
        return self._trainer

    @register("all")
    def save_model(self, name: str, root: str) -> str:
        """Write the checkpoint `root/step-XXXXXXXX` of the model, with its moments, and return its folder."""
        engine = self._trained(name).engine
        return engine.save_checkpoint(root, engine.step)

    @register("all")
    def export_model(self, name: str, folder: str) -> str:
        """Write the model in Hugging Face format, and return the folder; see `engine.export.export_hf`."""
        return str(export_hf(self._trained(name).engine, folder))

    @register("all", changes_weights=True)
    def load_model(self, name: str, folder: str, *, optimizer: bool = True) -> None:
        """Load a checkpoint, or a folder in Hugging Face format, into the model, which is created if there is none.

        Args:
            name: The name of the model.
            folder: The folder.
            optimizer: Whether to load the moments and the step count as well; otherwise they start from zero.

        Raises:
            ConfigError: Another model is being trained, or the moments of a folder in Hugging Face format are requested.
            CheckpointError, ModelError: The folder is damaged, or belongs to another model. There is no model of this name then.
        """
        is_exported = Path(folder).is_dir() and not (Path(folder) / MANIFEST).exists()
        if is_exported and optimizer:
            raise ConfigError(
                "the checkpoint has weights only, because it was saved for samplers; load it without the optimizer, or one of save_state"
            )
        # The name is released, so that `create_model` builds a fresh engine: moments and the step count must not remain
        # if `optimizer` is false.
        if self._trainer is not None and self._trainer.name == name:
            self._trainer = None
        self.create_model(name)
        try:
            # A checkpoint of the engine has a manifest; a folder in Hugging Face format does not. A URL can only be a
            # checkpoint.
            if is_exported:
                self.engine.load_weights(stored_weights(folder))
            else:
                self.engine.load_checkpoint(folder, optimizer=optimizer)
        except BaseException:
            # Weights that were loaded in part must not be trained under this name.
            self._trainer = None
            raise

    @register("all")
    def load_snapshot(self, name: str | None, folder: str) -> None:
        """Build an engine without an optimizer on the weights of a folder in Hugging Face format, which evaluates calls of this name."""
        if name in self._evaluated:
            self._evaluated.pop(name).engine.close()
        # Without an optimizer the engine holds neither gradients nor moments.
        config = replace(self.config, model=replace(self.config.model, path=folder), optim=None)
        self._evaluated[name] = FullTrainer(self._new_engine(config), name)

    def close(self) -> None:
        """Free all engines."""
        for trainer in self._evaluated.values():
            trainer.engine.close()
        self._evaluated.clear()
        super().close()

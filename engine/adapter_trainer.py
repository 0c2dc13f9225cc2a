"""Training of several adapters on one frozen model: their calls share forward and backward passes, and each has its own optimizer steps."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .adapter_checkpoint import load_adapter, save_adapter
from .adapters.bank import AdapterBank
from .adapters.config import AdapterConfig
from .adapters.slot import AdapterStep
from .base import BaseEngine
from .call_trainer import CallTrainer, TrainingCall
from .config import OptimConfig
from .errors import ConfigError
from .step import MicroBatchConsumer
from .step_plan import MicroBatch


class AdapterTrainer(CallTrainer):
    """Creates and trains the adapters of an engine. All methods are collective over the engine's ranks.

    Args:
        engine: An initialized engine with `model.max_adapters` above 0.

    Raises:
        ConfigError: The engine was built without `model.max_adapters`.
    """

    def __init__(self, engine: BaseEngine) -> None:
        if engine.adapters is None:
            raise ConfigError(
                f"model.max_adapters={engine.model_config.max_adapters}: the engine cannot create adapters while it runs; set model.max_adapters "
                "to their maximum number"
            )
        super().__init__(engine)
        self.bank: AdapterBank = engine.adapters
        """The adapters of the engine."""
        self.in_turns = self.bank.in_turns

    def create(self, name: str, config: AdapterConfig) -> None:
        """Create an adapter; see `AdapterBank.create`. An error on one rank is raised on all ranks."""
        with self.engine.topology.collective_errors():
            self.bank.create(name, config)

    def drop(self, name: str) -> None:
        """Free an adapter.

        Raises:
            ConfigError: There is no adapter with this name.
        """
        self.bank.drop(name)

    def save(self, name: str, root: Path | str, extra: Mapping[str, Any] | None = None) -> str:
        """Write a checkpoint of an adapter; see `adapter_checkpoint.save_adapter`."""
        return save_adapter(self.engine, self.bank[name], root, extra)

    def load(self, name: str, folder: Path | str, *, optimizer: bool = True) -> None:
        """Load a checkpoint into an adapter; see `adapter_checkpoint.load_adapter`."""
        load_adapter(self.engine, self.bank[name], folder, optimizer=optimizer)

    def optim_step(self, name: str, optim: OptimConfig) -> AdapterStep:
        """Run an optimizer step of an adapter; see `AdapterSlot.optim_step`.

        Raises:
            ConfigError: There is no such adapter, or the optimizer is not AdamW.
            NonFiniteError: The gradient is not finite.
        """
        if optim.name != "adamw":
            raise ConfigError(f"optim.name={optim.name} is not supported with model.max_adapters; use adamw")
        return self.bank[name].optim_step(optim, self.engine.topology.world)

    # ---- the interface of CallTrainer --------------------------------------------------------------------------------

    def check_model(self, call: TrainingCall) -> None:
        """See `CallTrainer.check_model`."""
        if call.adapter is not None:
            self.bank[call.adapter]
        elif not call.forward_only:
            raise ConfigError(
                "a call without an adapter (adapter=None) has nothing to train, because the model is frozen; name an adapter, or set forward_only"
            )

    def gradients(self, names: Collection[str]) -> dict[str, Tensor | None]:
        """See `CallTrainer.gradients`."""
        return {
            name: None if (grads := self.bank[name].grads) is None else grads.clone() for name in names if name in self.bank
        }

    def restore_gradients(self, gradients: Mapping[str, Tensor | None]) -> None:
        """See `CallTrainer.restore_gradients`."""
        for name, of_adapter in gradients.items():
            self.bank[name].grads = of_adapter

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], consumer: MicroBatchConsumer, names: Collection[str], *, backward: bool
    ) -> None:
        """See `CallTrainer.accumulate`."""
        with self.engine.train_mode() if backward else self.engine.eval_mode():
            self.engine.run_micro_batches(micro_batches, consumer, backward=backward)
        for name in names if backward else ():
            # A rank without documents of an adapter contributes zeros to the sum in the adapter's next step.
            self.bank[name].require_gradients()

"""What every worker on an engine has: its life, where its state is, its checkpoints."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ...engine.backend import Adapters
from ...engine.base import BaseEngine
from ...engine.config import EngineConfig, ModelConfig, OptimConfig
from ...engine.errors import BatchError, ConfigError
from ...engine.loss import Loss, OutputRequest, StepResult, loss_mask
from ...engine.packing.batch import PackedBatch
from ...engine.registry import engine_class
from ..batch_adapters import BatchAdapter, adapt_batch
from ..dispatch import register


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """A role's model, and the engine that runs it.

    Args:
        model: which model.
        engine: layout, precision, budgets.
        optim: of a role that learns.
        total_steps: of the whole run; needed by schedules that end.
        passengers: fields of the caller's batches that ride along; any other that nobody reads is refused.
    """

    model: ModelConfig
    engine: EngineConfig = field(default_factory=EngineConfig)
    optim: OptimConfig | None = None
    total_steps: int | None = None
    passengers: tuple[str, ...] = ()


class Worker:
    """A role on an engine. Every method is collective over the worker's ranks, and takes this rank's data-parallel share.

    Args:
        config: of the role.
        ranks: the global ranks that make up its engine; all by default.
    """

    head: ClassVar[str] = "lm"
    learns: ClassVar[bool] = False

    def __init__(self, config: WorkerConfig, ranks: Sequence[int] | None = None) -> None:
        role = type(self).__name__
        if config.model.head != self.head:
            raise ConfigError(f"model.head={config.model.head}: {role} needs model.head={self.head}")
        if self.learns != (config.optim is not None):
            says = "learns, and needs optim" if self.learns else "never learns; leave optim out"
            raise ConfigError(f"optim={config.optim}: {role} {says}")
        self.config = config
        self.engine: BaseEngine = engine_class(config.engine.backend)(
            model=config.model, engine=config.engine, optim=config.optim, total_steps=config.total_steps, ranks=ranks
        )

    def check(self) -> None:
        """Refuse what can be told from the settings; reads no weight. Not collective.

        Raises:
            DrivetrainError: names the setting.
        """
        self.engine.check()

    def initialize(self) -> Self:
        """Build the model; an error of one rank is raised on all."""
        self.check()
        self.engine.initialize()
        return self

    @register("all")
    def to(self, place: str) -> None:
        """Let the state rest on `host` or `disk`, or bring it back to the `device`. A method brings what it needs and lets it
        rest again."""
        self.engine.to(place)

    @register("all")
    def save_checkpoint(self, root: Path | str, step: int, extra: Mapping[str, Any] | None = None) -> str:
        """Write `root/step-XXXXXXXX`; the folder. See `BaseEngine.save_checkpoint`."""
        return self.engine.save_checkpoint(root, step, extra)

    @register("all")
    def load_checkpoint(self, folder: Path | str) -> int:
        """Take over a checkpoint of any engine and layout; its step."""
        return self.engine.load_checkpoint(folder).step

    def weights(self, *, adapters: Adapters = "merged") -> AbstractContextManager[Iterator[tuple[str, Tensor]]]:
        """Stream full tensors under Hugging Face names, one at a time, on every rank; see `BaseEngine.named_weights`."""
        return self.engine.named_weights(adapters=adapters)

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()

    def _open(self, data: Any) -> BatchAdapter:
        """The caller's batch. Collective: what is wrong with one rank's share is raised on all."""
        with self.engine.topology.collective_errors():
            return adapt_batch(data, self.config.passengers)

    def _infer(self, data: Any, request: OutputRequest, names: Mapping[str, str]) -> Any:
        adapter = self._open(data)
        found = self.engine.infer_batch(adapter.batch, request, tokens=loss_mask(adapter.batch))
        return adapter.answer({names[name]: value for name, value in found.items()})

    def _update(self, data: Any, loss: Loss, steps: Sequence[Sequence[int]] | None) -> list[StepResult]:
        """An optimizer step for each part of the share. All of them are checked before the first is made.

        Raises:
            BatchError: there is nothing to learn from, or a step cannot be made.
        """
        batch = self._open(data).batch
        with self.engine.topology.collective_errors():
            parts = [list(range(batch.num_sequences))] if steps is None else [_rows(rows, batch) for rows in steps]
            if not parts:
                raise BatchError("an update of no steps; give a batch with sequences in it")
        plans = self.engine.check_batches((batch.select(part) for part in parts), len(parts), loss)
        with self.engine.train_mode():
            return [
                self.engine.train_batch(batch.select(part), loss, plan=plan) for part, plan in zip(parts, plans, strict=True)
            ]


def _rows(rows: Sequence[int], batch: PackedBatch) -> list[int]:
    found = [operator.index(row) for row in rows]
    if off := [row for row in found if not 0 <= row < batch.num_sequences]:
        raise BatchError(f"steps names row {off[0]}; this rank's share has the rows 0 to {batch.num_sequences - 1}")
    return found


def on_host(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors where another process can take them."""
    return {name: value.detach().to(torch.device("cpu")) for name, value in values.items()}

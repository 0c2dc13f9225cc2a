"""The base class of workers that run an engine: setup, state placement, checkpoints."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ...engine.backend import Adapters
from ...engine.base import BaseEngine
from ...engine.config import EngineConfig, ModelConfig, OptimConfig
from ...engine.errors import BatchError, ConfigError
from ...engine.export import export_hf
from ...engine.loss import Loss, OutputRequest, StepResult, loss_mask
from ...engine.ops.expert_routes import ROUTED_EXPERTS
from ...engine.packing.batch import PackedBatch
from ...engine.registry import engine_class
from .batch_adapters import BatchAdapter, adapt_batch
from .dispatch import register


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The model of a role and the engine that runs it.

    Args:
        model: The model.
        engine: The parallel layout, precision and token budgets.
        optim: The optimizer settings, for a role that is trained.
        total_steps: The total number of optimizer steps of the run, for learning-rate schedules with an end.
        extra_fields: The names of fields in the caller's batches that are carried along although nothing reads them. Any other
            unread field raises an error.
    """

    model: ModelConfig
    engine: EngineConfig = field(default_factory=EngineConfig)
    optim: OptimConfig | None = None
    total_steps: int | None = None
    extra_fields: tuple[str, ...] = ()


_PARTS = {"parameters": "params", "gradients": "grads", "optimizer": "optimizer"}


class Worker:
    """A role that runs on an engine.

    Every method is collective over the worker's ranks and takes this rank's data-parallel shard.

    Args:
        config: The configuration of the role.
        ranks: The global ranks that run its engine; None uses all ranks.
    """

    head: ClassVar[str] = "lm"
    trainable: ClassVar[bool] = False

    def __init__(self, config: WorkerConfig, ranks: Sequence[int] | None = None) -> None:
        role = type(self).__name__
        if config.model.head != self.head:
            raise ConfigError(
                f"model.head={config.model.head}: {role} needs model.head={self.head}; set that, or use the worker of the other head"
            )
        if self.trainable != (config.optim is not None):
            problem = "is trained and needs optim" if self.trainable else "is never trained; remove optim"
            raise ConfigError(f"optim={config.optim}: {role} {problem}")
        self.config = config
        self.engine: BaseEngine = engine_class(config.engine.backend)(
            model=config.model, engine=config.engine, optim=config.optim, total_steps=config.total_steps, ranks=ranks
        )

    def check(self) -> None:
        """Validate everything that can be checked without reading weights. Not collective.

        Raises:
            DrivetrainError: A setting is invalid; the message names it.
        """
        self.engine.check()

    def initialize(self) -> Self:
        """Build the model; an error on one rank is raised on all ranks."""
        self.check()
        self.engine.initialize()
        return self

    @register("all")
    def to(self, place: str, part: str | None = None) -> None:
        """Offload the state to `host` or `disk`, or reload it to the `device`.

        Methods reload what they need and offload it again afterwards.

        Args:
            place: The target: `host`, `disk` or `device`.
            part: `parameters`, `gradients` or `optimizer`; None is all of them.

        Raises:
            ConfigError: There is no such place or part.
        """
        if part not in (None, *_PARTS):
            raise ConfigError(f"to({place!r}, {part!r}): the parts of an engine are {', '.join(_PARTS)}")
        selected = {flag: part in (None, name) for name, flag in _PARTS.items()}
        self.engine.to(place, **selected)

    @register("all")
    def state_bytes(self) -> dict[str, int]:
        """Return the size of each part of the state in this process, in bytes.

        Besides the parameters, a trained role reports the maximum size of its other parts.
        """
        parameters = self.engine.parameter_bytes()
        if not self.trainable:
            return {"parameters": parameters}
        shape = self.engine.model_shape
        trained = int(parameters * shape.parameters_trained / max(1, shape.parameters))
        # AdamW keeps two moments per trained parameter.
        return {"parameters": parameters, "gradients": trained, "optimizer": 2 * trained}

    @register("all")
    def describe_settings(self) -> list[str]:
        """Return lines about how `auto` settings of the engine were resolved. See `BaseEngine.describe_settings`."""
        return self.engine.describe_settings()

    @register("all")
    def save_checkpoint(self, root: Path | str, step: int, extra: Mapping[str, Any] | None = None) -> str:
        """Write the checkpoint `root/step-XXXXXXXX` and return its folder. See `BaseEngine.save_checkpoint`."""
        return self.engine.save_checkpoint(root, step, extra)

    @register("all", changes_weights=True)
    def load_checkpoint(self, folder: Path | str) -> int:
        """Load a checkpoint written by any engine and parallel layout, and return its step."""
        return self.engine.load_checkpoint(folder).step

    @register("all")
    def export(self, folder: str, adapters: Adapters = "merged") -> str:
        """Write the model in Hugging Face format and return the folder; see `engine.export.export_hf`."""
        return str(export_hf(self.engine, folder, adapters=adapters))

    def weights(self, *, adapters: Adapters = "merged") -> AbstractContextManager[Iterator[tuple[str, Tensor]]]:
        """Stream full tensors under their Hugging Face names, one at a time, on every rank. See `BaseEngine.named_weights`."""
        return self.engine.named_weights(adapters=adapters)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, eta: float = 1.0) -> None:
        """Load full tensors, as another role's `weights()` streams them. See `BaseEngine.load_weights`."""
        self.engine.load_weights(weights, eta=eta)

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()

    replays_routes: ClassVar[bool] = False
    """Whether the role replays the `routed_experts` of a batch. These belong to one model of the group, the policy."""

    def _open(self, data: Any, *, replay: bool | None = None) -> BatchAdapter:
        """Convert the caller's batch. Collective: an error in one rank's shard is raised on all ranks."""
        with self.engine.topology.collective_errors():
            adapter = adapt_batch(data, self.config.extra_fields)
            return adapter if (self.replays_routes if replay is None else replay) else _without_routes(adapter)

    def _infer(self, data: Any, request: OutputRequest, names: Mapping[str, str], *, replay: bool | None = None) -> Any:
        adapter = self._open(data, replay=replay)
        outputs = self.engine.infer_batch(adapter.batch, request, tokens=loss_mask(adapter.batch))
        return adapter.answer({names[name]: value for name, value in outputs.items()})

    def _evaluate(self, data: Any, loss: Loss) -> dict[str, float]:
        """Return the loss of a batch and its metrics, without training."""
        result = self.engine.forward_backward(self._open(data).batch, loss, forward_only=True)
        return {"loss": result.loss, **result.terms, **result.metrics}

    def _update(self, data: Any, loss: Loss, steps: Sequence[Sequence[int]] | None) -> list[StepResult]:
        """Run one optimizer step per entry of `steps`. All entries are checked before the first step runs.

        Raises:
            BatchError: The update has no steps, or a step is invalid.
        """
        batch = self._open(data).batch
        with self.engine.topology.collective_errors():
            parts = [list(range(batch.num_sequences))] if steps is None else [_rows(rows, batch) for rows in steps]
            if not parts:
                raise BatchError("the update has no steps; pass a batch that contains sequences")
        # All steps are checked now, because an error in a later step would leave the role partly updated.
        plans = self.engine.check_batches((batch.select(part) for part in parts), len(parts), loss)
        # Around all steps, so that state that is offloaded moves to the device and back only once.
        with self.engine.train_mode():
            return [
                self.engine.train_batch(batch.select(part), loss, plan=plan) for part, plan in zip(parts, plans, strict=True)
            ]


def _without_routes(adapter: BatchAdapter) -> BatchAdapter:
    batch = adapter.batch
    if ROUTED_EXPERTS not in batch.token_fields:
        return adapter
    fields = {name: values for name, values in batch.token_fields.items() if name != ROUTED_EXPERTS}
    return replace(adapter, batch=replace(batch, token_fields=fields))


def _rows(rows: Sequence[int], batch: PackedBatch) -> list[int]:
    # Accepts NumPy integers, and refuses floats.
    indices = [operator.index(row) for row in rows]
    if outside := [row for row in indices if not 0 <= row < batch.num_sequences]:
        raise BatchError(f"steps contains row {outside[0]}; this rank's shard has rows 0 to {batch.num_sequences - 1}")
    return indices


def to_host(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to host memory, where other processes can receive them."""
    return {name: value.detach().to(torch.device("cpu")) for name, value in values.items()}

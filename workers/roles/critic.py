"""The critic: estimates the value of an unfinished completion."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine.loss import OutputRequest, StepResult
from ...losses.value import ValueLoss
from .base import Worker, WorkerConfig
from .dispatch import register


@dataclass(frozen=True, kw_only=True)
class CriticConfig(WorkerConfig):
    """The configuration of a critic; its model has `head=value`.

    Args:
        loss: The loss of its updates.
    """

    loss: ValueLoss = ValueLoss()


class CriticWorker(Worker):
    """A trainable value function.

    Args:
        config: The configuration of the role.
        ranks: The global ranks that run its engine; None uses all ranks.
    """

    head: ClassVar[str] = "value"
    trainable: ClassVar[bool] = True
    config: CriticConfig

    @register("dp")
    def compute_values(self, data: Any) -> Any:
        """Compute the `values` of the states before each completion token, in the caller's format."""
        return self._infer(data, OutputRequest(values=True), {"values": "values"})

    @register("minibatches")
    def update(self, data: Any, steps: Sequence[Sequence[int]] | None = None) -> list[StepResult]:
        """Train the value function on `returns`; see `ActorWorker.update`."""
        return self._update(data, self.config.loss, steps)

    @register("dp", returns="numbers")
    def evaluate(self, data: Any) -> dict[str, float]:
        """Compute the `loss` of a batch of completions and its metrics, without training.

        Args:
            data: This rank's data-parallel shard, with the fields that the loss needs.
        """
        return self._evaluate(data, self.config.loss)

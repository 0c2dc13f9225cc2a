"""The critic: says what an unfinished answer is worth."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine.loss import OutputRequest, StepResult
from ..dispatch import register
from ..losses.value import ValueLoss
from .base import Worker, WorkerConfig


@dataclass(frozen=True, kw_only=True)
class CriticConfig(WorkerConfig):
    """A critic; its model has `head=value`.

    Args:
        loss: of its updates.
    """

    loss: ValueLoss = ValueLoss()


class CriticWorker(Worker):
    """A value function that learns.

    Args:
        config: of the role.
        ranks: of its engine.
    """

    head: ClassVar[str] = "value"
    learns: ClassVar[bool] = True
    config: CriticConfig

    @register("dp")
    def compute_values(self, data: Any) -> Any:
        """`values` of the states in which response tokens were chosen, in the caller's form."""
        return self._infer(data, OutputRequest(values=True), {"values": "values"})

    @register("minibatches")
    def update(self, data: Any, steps: Sequence[Sequence[int]] | None = None) -> list[StepResult]:
        """Learn `returns`; see `ActorWorker.update`."""
        return self._update(data, self.config.loss, steps)

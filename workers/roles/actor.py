"""The policy: says how likely its answers were, and learns from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine.errors import ConfigError
from ...engine.loss import OutputRequest, StepResult
from ..dispatch import register
from ..losses.policy import PolicyLoss
from .base import Worker, WorkerConfig


@dataclass(frozen=True, kw_only=True)
class ActorConfig(WorkerConfig):
    """A policy.

    Args:
        loss: of its updates; its temperature is that of its log-probabilities.
    """

    loss: PolicyLoss = PolicyLoss()

    @property
    def temperature(self) -> float:
        """Of its log-probabilities; all roles of a group must have the same."""
        return self.loss.temperature


class ActorWorker(Worker):
    """A policy that learns.

    Args:
        config: of the role.
        ranks: of its engine.
    """

    learns: ClassVar[bool] = True
    config: ActorConfig

    @register("dp")
    def compute_log_probs(self, data: Any, *, entropy: bool = False) -> Any:
        """`log_probs` of response tokens and, when asked for, their `entropy` in nats; in the caller's form.

        Args:
            data: this rank's share, in a form of `workers.padding`.
            entropy: with the entropy of each token's distribution.
        """
        request = OutputRequest(log_probs=True, entropy=entropy, temperature=self.config.loss.temperature)
        return self._infer(data, request, {"log_probs": "log_probs", "entropy": "entropy"})

    @register("minibatches")
    def update(
        self, data: Any, steps: Sequence[Sequence[int]] | None = None, *, loss: PolicyLoss | None = None
    ) -> list[StepResult]:
        """Learn from answers.

        Args:
            data: this rank's share with `old_log_probs`, `advantages` and what else the loss asks for.
            steps: for each optimizer step rows of the share, equally many steps on every rank; None: one step on all of it. A group
                makes them of `MiniBatches`.
            loss: of this update; the role's by default.

        Returns:
            each step's result.
        """
        if loss is not None and loss.temperature != self.config.temperature:
            raise ConfigError(
                f"loss.temperature={loss.temperature}: the actor's log-probabilities are taken at {self.config.temperature} (config.loss), so "
                "ratios would compare two distributions; use one temperature"
            )
        return self._update(data, loss or self.config.loss, steps)

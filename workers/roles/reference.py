"""The reference: a policy that is never trained."""

from dataclasses import dataclass
from typing import Any

from ...engine.loss import OutputRequest
from .base import Worker, WorkerConfig
from .dispatch import register


@dataclass(frozen=True, kw_only=True)
class ReferenceWorkerConfig(WorkerConfig):
    """The configuration of a reference policy.

    Args:
        temperature: The temperature of its log-probabilities; must be the actor's.
    """

    temperature: float = 1.0


class ReferenceWorker(Worker):
    """A frozen policy that the actor is compared to.

    Args:
        config: The configuration of the role.
        ranks: The global ranks that run its engine; None uses all ranks.
    """

    config: ReferenceWorkerConfig

    @register("dp")
    def compute_log_probs(self, data: Any) -> Any:
        """Compute the `reference_log_probs` of completion tokens, in the caller's format."""
        request = OutputRequest(log_probs=True, temperature=self.config.temperature)
        return self._infer(data, request, {"log_probs": "reference_log_probs"})

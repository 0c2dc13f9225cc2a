"""The reference: a policy that never learns."""

from dataclasses import dataclass
from typing import Any

from ...engine.loss import OutputRequest
from ..dispatch import register
from .base import Worker, WorkerConfig


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(WorkerConfig):
    """A frozen policy.

    Args:
        temperature: of its log-probabilities; the actor's.
    """

    temperature: float = 1.0


class ReferenceWorker(Worker):
    """A policy that others are compared with.

    Args:
        config: of the role.
        ranks: of its engine.
    """

    config: ReferenceConfig

    @register("dp")
    def compute_log_probs(self, data: Any) -> Any:
        """`reference_log_probs` of response tokens, in the caller's form."""
        request = OutputRequest(log_probs=True, temperature=self.config.temperature)
        return self._infer(data, request, {"log_probs": "reference_log_probs"})

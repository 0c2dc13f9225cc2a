"""SAPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...engine.config import setting
from ..algorithms import algorithm
from ..registry import check_positive
from .base import Objective, TokenLosses, objective

if TYPE_CHECKING:
    from torch import Tensor

    from ..policy import PolicyTokens

PAPER = "Gao et al. 2025, arXiv:2511.20347"


@objective("sapo", "the ratio through a logistic function, which fades out smoothly", paper=PAPER)
@dataclass(frozen=True, kw_only=True)
class SAPOObjective(Objective):
    """SAPO's loss: -A (4 / tau) s(tau (r - 1)), whose gradient fades smoothly as the ratio moves away from 1.

    Args:
        tau_positive: tau for A > 0.
        tau_negative: tau for all other tokens; a value larger than `tau_positive` makes the gradient fade sooner.

    Source: Gao et al. 2025, SAPO, arXiv:2511.20347.
    """

    tau_positive: float = setting(
        1.0, "temperature of the soft gate of tokens with a positive advantage; a larger one makes the gradient fade sooner"
    )
    tau_negative: float = setting(1.05, "temperature of the soft gate of all other tokens")

    def _check_values(self) -> None:
        check_positive(self, "tau_positive", "tau_negative")

    def token_losses(self, x: PolicyTokens, ratio: Tensor) -> TokenLosses:
        import torch

        # An advantage of 0 gets the negative tau, which has no effect: its loss is 0.
        tau = torch.full_like(ratio, self.tau_negative).masked_fill(x.advantages > 0, self.tau_positive)
        # The factor 4 / tau makes the slope 1 at a ratio of 1, as that of the plain objective.
        # The value at a ratio of 1 is 2 / tau and not 1, which adds a constant to the loss; the gradient is what
        # counts.
        return TokenLosses(-x.advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau)


algorithm(
    "sapo",
    paper=PAPER,
    loss={"objective": "sapo", "aggregation": "seq-mean-token-mean"},
    advantage={"estimator": "grpo"},
)

"""CISPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...engine.config import setting
from ...engine.errors import ConfigError
from ..algorithms import algorithm
from ..registry import check_not_negative
from .base import Objective, TokenLosses, clip_bounds, objective

if TYPE_CHECKING:
    from torch import Tensor

    from ..policy import PolicyTokens

PAPER = "MiniMax 2025, arXiv:2506.13585"


@objective("cispo", "log-probability with the clipped ratio as its weight, so that every token has a gradient", paper=PAPER)
@dataclass(frozen=True, kw_only=True)
class CISPOObjective(Objective):
    """CISPO's loss: -sg(clip(r, 1 - low, 1 + high)) A log p. Every token has a gradient, with a bounded weight.

    Args:
        clip_low: Distance below 1 beyond which the weight is constant; 1 means no bound.
        clip_high: Distance above 1 beyond which the weight is constant; None uses the value of `clip_low`.

    Source: MiniMax 2025, MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """

    clip_low: float = setting(0.2, "distance below 1 at which the ratio is clipped")
    clip_high: float | None = setting(None, "distance above 1 at which the ratio is clipped")

    def _check_values(self) -> None:
        check_not_negative(self, "clip_low", "clip_high")
        # Unlike in `clipped`, exactly 1 is valid: here it stands for a weight without a lower bound, as in the paper.
        if self.clip_low > 1:
            raise ConfigError(f"clip_low={self.clip_low}; ratios are always positive, so it must be at most 1")

    def token_losses(self, x: PolicyTokens, ratio: Tensor) -> TokenLosses:
        low, high = clip_bounds(self.clip_low, self.clip_high)
        # Detached: the gradient flows through `log_probs` alone, and a clipped weight does not stop it.
        weight = ratio.detach().clamp(1 - low, 1 + high)
        return TokenLosses(-weight * x.advantages * x.log_probs, weight != ratio.detach())


# Without a lower bound, as in the paper; the upper bound is DAPO's.
algorithm(
    "cispo",
    summary="log-probability with a weight clipped at 1.28",
    paper=PAPER,
    loss={"objective": "cispo", "clip_low": 1.0, "clip_high": 0.28},
    advantage={"estimator": "grpo"},
)

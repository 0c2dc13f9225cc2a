"""DPPO, which bounds the change of a token's probability."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...engine.config import setting
from ..algorithms import algorithm
from ..registry import check_not_negative, check_positive
from .base import Objective, TokenLosses, clip_bounds, objective

if TYPE_CHECKING:
    from torch import Tensor

    from ..policy import PolicyTokens

PAPER = "Qi et al. 2026, arXiv:2602.04879"
_BINARY_EPS = 1e-8
"""Keeps the divergence of two binary distributions finite if one outcome is certain, as in verl."""


@dataclass(frozen=True, kw_only=True)
class _DPPOObjective(Objective):
    """The common part of both divergences: -sg(min(r, c)) A log p, for tokens inside a region around the old policy."""

    clip_low: float = setting(0.2, "divergence up to which a token that has become less likely is trained on")
    clip_high: float | None = setting(None, "divergence up to which a token that has become more likely is trained on")
    max_ratio: float = setting(20.0, "largest weight of a token")

    def _check_values(self) -> None:
        check_not_negative(self, "clip_low", "clip_high")
        check_positive(self, "max_ratio")

    def token_losses(self, x: PolicyTokens, ratio: Tensor) -> TokenLosses:
        import torch

        inside = self._inside(x, *clip_bounds(self.clip_low, self.clip_high))
        # A weight of 0 removes the gradient of tokens outside.
        weight = torch.where(inside, ratio.detach().clamp(max=self.max_ratio), torch.zeros_like(ratio))
        return TokenLosses(-weight * x.advantages * x.log_probs, ~inside)

    @abstractmethod
    def _inside(self, x: PolicyTokens, low: float, high: float) -> Tensor:
        """Return whether each token is inside the region."""


@objective("dppo_tv", "log-probability, weighted by the ratio, of tokens whose probability has moved little", paper=PAPER)
@dataclass(frozen=True, kw_only=True)
class DPPOTVObjective(_DPPOObjective):
    """DPPO's loss with the total variation: -sg(min(r, c)) A log p, for tokens whose probability has moved little.

    Args:
        clip_low: The largest q - p up to which a token without a positive advantage is trained on. p is the probability under the
            current policy, and q the one under the policy that sampled the completion.
        clip_high: The largest p - q up to which a token with a positive advantage is trained on; None uses the value of `clip_low`.
        max_ratio: c, the largest weight of a token.

    Source: Qi et al. 2026, DPPO, arXiv:2602.04879, the binary approximation; bounded weights are from section 5.4.
    """

    def _inside(self, x: PolicyTokens, low: float, high: float) -> Tensor:
        import torch

        # One-sided: a token that moved against its advantage is always inside, as in the KL variant. Detached, since
        # the region selects tokens and has no gradient itself.
        moved = (x.log_probs.exp() - x.old.exp()).detach()
        return torch.where(x.advantages > 0, moved <= high, moved >= -low)


@objective(
    "dppo_kl", "log-probability, weighted by the ratio, of tokens whose distribution has a small KL divergence", paper=PAPER
)
@dataclass(frozen=True, kw_only=True)
class DPPOKLObjective(_DPPOObjective):
    """DPPO's loss with the KL divergence, of the binary choice between the token and all others: KL(q, 1 - q || p, 1 - p).

    Args:
        clip_low: The largest divergence up to which a token without a positive advantage that has become less likely is trained on.
        clip_high: The largest divergence up to which a token with a positive advantage that has become more likely is trained on; None
            uses the value of `clip_low`.
        max_ratio: The largest weight of a token.

    Source: as for `DPPOTVObjective`.
    """

    def _inside(self, x: PolicyTokens, low: float, high: float) -> Tensor:
        import torch

        log_p = x.log_probs.detach()
        p, q = log_p.exp(), x.old.exp()
        divergence = q * (x.old - log_p) + (1 - q) * torch.log((1 - q + _BINARY_EPS) / (1 - p + _BINARY_EPS))
        # A token that moved against its advantage is always inside: its gradient brings it back.
        rising, falling = (divergence <= high) | (p <= q), (divergence <= low) | (p >= q)
        return torch.where(x.advantages > 0, rising, falling)


# The thresholds are those of verl's example.
algorithm(
    "dppo_tv",
    summary="log-probability, weighted by the ratio, of tokens whose probability moved by at most 0.15",
    paper=PAPER,
    loss={"objective": "dppo_tv", "clip_low": 0.15},
    advantage={"estimator": "grpo"},
)
algorithm(
    "dppo_kl",
    summary="log-probability, weighted by the ratio, of tokens whose divergence is at most 0.05",
    paper=PAPER,
    loss={"objective": "dppo_kl", "clip_low": 0.05},
    advantage={"estimator": "grpo"},
)

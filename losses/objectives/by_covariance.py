"""Clip-Cov and KL-Cov, which preserve the entropy by treating a few tokens of high covariance differently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...engine.config import setting
from ...engine.errors import ConfigError
from ..algorithms import algorithm
from ..registry import check_not_negative
from .base import CovarianceSelection, Objective, TokenLosses, objective
from .clipped import ClippedObjective, check_ratio_bound

if TYPE_CHECKING:
    from torch import Tensor

    from ..policy import PolicyTokens

PAPER = "Cui et al. 2025, arXiv:2505.22617"
_FRACTION = "fraction of a step's tokens to select"


@objective(
    "clip_cov",
    "as `clipped`; a few tokens with a high covariance of advantage and log-probability are left out, which preserves the entropy",
    paper=PAPER,
)
@dataclass(frozen=True, kw_only=True)
class ClipCovObjective(Objective):
    """PPO's clipped loss without the tokens whose gradient would cost the most entropy; see `covariance.select_between`.

    Args:
        clip_low: Distance below 1 at which the ratio is clipped.
        clip_high: Distance above 1 at which the ratio is clipped; None uses the value of `clip_low`.
        cov_fraction: The fraction of tokens to leave out.
        cov_bounds: The covariances between which tokens are left out.

    Source: Cui et al. 2025, arXiv:2505.22617, Clip-Cov.
    """

    token_fields: ClassVar[tuple[str, ...]] = ("high_covariance",)

    clip_low: float = setting(0.2, "distance below 1 at which the ratio is clipped")
    clip_high: float | None = setting(None, "distance above 1 at which the ratio is clipped")
    cov_fraction: float = setting(2e-4, _FRACTION)
    cov_bounds: tuple[float, float] = setting((1.0, 5.0), "covariances between which tokens are selected")

    def _check_values(self) -> None:
        check_not_negative(self, "clip_low", "clip_high")
        check_ratio_bound(self.clip_low)
        _check_fraction(self.cov_fraction)
        if not self.cov_bounds[0] < self.cov_bounds[1]:
            raise ConfigError(f"cov_bounds={list(self.cov_bounds)}; the lower bound must be below the upper one")

    @property
    def selection(self) -> CovarianceSelection:
        return CovarianceSelection(self.cov_fraction, self.cov_bounds)

    def token_losses(self, x: PolicyTokens, ratio: Tensor) -> TokenLosses:
        import torch

        plain = ClippedObjective(clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=None).token_losses(x, ratio)
        # Marked before the updates of a step (see `CovarianceSelection`): here, in a micro-batch, the covariances of
        # the step are not known.
        selected = x.field("high_covariance") > 0
        return TokenLosses(torch.where(selected, torch.zeros_like(plain.losses), plain.losses), selected)


@objective(
    "kl_cov",
    "not clipped; tokens with the highest covariance have a penalty on their change, which preserves the entropy",
    paper=PAPER,
)
@dataclass(frozen=True, kw_only=True)
class KLCovObjective(Objective):
    """-A r, with a penalty + beta |log r| at the tokens of `covariance.select_largest`, whose gradient would cost the most entropy.

    Args:
        cov_fraction: The fraction of tokens with the penalty.
        cov_coef: beta, the weight of the penalty.

    Source: Cui et al. 2025, arXiv:2505.22617, KL-Cov, with verl's estimate of the divergence.
    """

    token_fields: ClassVar[tuple[str, ...]] = ("high_covariance",)

    cov_fraction: float = setting(2e-4, _FRACTION)
    cov_coef: float = setting(1.0, "weight of the penalty on selected tokens")

    def _check_values(self) -> None:
        _check_fraction(self.cov_fraction)
        check_not_negative(self, "cov_coef")

    @property
    def selection(self) -> CovarianceSelection:
        return CovarianceSelection(self.cov_fraction)

    def token_losses(self, x: PolicyTokens, ratio: Tensor) -> TokenLosses:
        import torch

        selected = x.field("high_covariance") > 0
        # Of the log-ratio without the bound that `ratio` has, so that the penalty keeps its gradient however far a
        # token has moved.
        penalty = torch.where(selected, x.log_ratio, torch.zeros_like(x.log_ratio)).abs()
        return TokenLosses(-x.advantages * ratio + self.cov_coef * penalty, selected)


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ConfigError(f"cov_fraction={fraction}; it is a fraction of the tokens, above 0 and at most 1")


# The settings are those of verl.
algorithm("clip_cov", paper=PAPER, loss={"objective": "clip_cov"}, advantage={"estimator": "grpo"})
algorithm("kl_cov", paper=PAPER, loss={"objective": "kl_cov", "cov_fraction": 2e-3}, advantage={"estimator": "grpo"})

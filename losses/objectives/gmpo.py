"""GMPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...engine.config import setting
from ..algorithms import algorithm
from ..names import Aggregation
from ..registry import check_not_negative
from .base import MAX_LOG_RATIO, Objective, TokenLosses, clip_bounds, objective

if TYPE_CHECKING:
    from torch import Tensor

    from ..policy import PolicyTokens

PAPER = "Zhao et al. 2025, arXiv:2507.20673"


@objective("gmpo", "the geometric mean of a completion's ratios, clipped per token", paper=PAPER)
@dataclass(frozen=True, kw_only=True)
class GMPOObjective(Objective):
    """GMPO's loss: -A times the geometric mean of a completion's clipped ratios, the same number at each of its tokens.

    A is the mean of the advantages of a completion.

    Args:
        clip_low: Distance below 0 at which a log-ratio is clipped.
        clip_high: Distance above 0 at which a log-ratio is clipped; None uses the value of `clip_low`.

    Source: Zhao et al. 2025, GMPO, arXiv:2507.20673, clipped per token as in the paper.
    """

    # The loss is a mean over completions.
    aggregation: ClassVar[Aggregation | None] = "seq-mean-token-mean"

    clip_low: float = setting(0.2, "distance below 0 at which a log-ratio is clipped")
    clip_high: float | None = setting(None, "distance above 0 at which a log-ratio is clipped")

    def _check_values(self) -> None:
        check_not_negative(self, "clip_low", "clip_high")

    def token_losses(self, x: PolicyTokens, ratio: Tensor) -> TokenLosses:
        import torch

        from ..sequences import sequence_of, sequence_sums

        low, high = clip_bounds(self.clip_low, self.clip_high)
        log_ratio, advantages = x.log_ratio, x.advantages
        # `[N]` and `[T]`. A document without completion tokens has a count of 0, and its mean would be a NaN.
        counts, rows = sequence_sums(x.mask, x.batch).clamp(min=1), sequence_of(x.batch)
        bounded = log_ratio.clamp(-low, high)
        # The smaller of the two objectives, as in PPO.
        pessimistic = torch.where(advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
        # A token without an advantage has no pessimistic side; it counts as one whose ratio is 1.
        pessimistic = torch.where(advantages == 0, torch.zeros_like(pessimistic), pessimistic)
        means = sequence_sums(pessimistic * x.mask, x.batch) / counts
        # The exponential of the mean of the logarithms.
        # The pessimistic side of a log-ratio is not clipped, so the mean needs a bound of its own.
        geometric = means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        # `[N]`; the aggregation takes the mean over a completion's tokens, which leaves the number as it is.
        losses = -(sequence_sums(advantages * x.mask, x.batch) / counts) * geometric
        return TokenLosses(losses[rows], (pessimistic != log_ratio).detach() & (advantages != 0))


algorithm(
    "gmpo",
    summary="the geometric mean of a completion's ratios, clipped at exp(±0.4) per token",
    paper=PAPER,
    loss={"objective": "gmpo", "aggregation": "seq-mean-token-mean", "clip_low": 0.4},
    advantage={"estimator": "grpo"},
)

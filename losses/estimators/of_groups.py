"""Estimators with one advantage per completion, relative to the other completions to the same prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...engine.config import setting
from ..algorithms import algorithm
from .base import Estimator, EstimatorInputs, estimator

if TYPE_CHECKING:
    from torch import Tensor

    from ..advantages import Reduce

_SCALE = "divide by the standard deviation of the group"
# The default objective has a dual clip; these algorithms are defined without one.
_PLAIN = {"dual_clip": None}
_SUMMARY = "clipped at 0.2, mean over tokens"


@estimator(
    "grpo", "reward minus the mean of the group, divided by its standard deviation", paper="Shao et al. 2024, arXiv:2402.03300"
)
@dataclass(frozen=True, kw_only=True)
class GRPOEstimator(Estimator):
    """See `losses.advantages.grpo`.

    Args:
        scale: Whether to divide by the group's standard deviation.
    """

    scale: bool = setting(True, _SCALE)

    def estimate(self, x: EstimatorInputs) -> tuple[Tensor, Tensor | None]:
        from ..advantages import grpo

        return grpo(x.rewards(), x.groups(), scale=self.scale), None


@estimator(
    "pass_at_k",
    "the best completion's distance to the second best, over the standard deviation; 0 for all others",
    paper="Tang et al. 2025, arXiv:2503.19595",
)
@dataclass(frozen=True, kw_only=True)
class PassAtKEstimator(Estimator):
    """See `losses.advantages.pass_at_k`.

    Args:
        scale: Whether to divide by the group's standard deviation.
    """

    scale: bool = setting(True, _SCALE)

    def estimate(self, x: EstimatorInputs) -> tuple[Tensor, Tensor | None]:
        from ..advantages import pass_at_k

        return pass_at_k(x.rewards(), x.groups(), scale=self.scale), None


@estimator("rloo", "reward minus the mean of the other completions", paper="Ahmadian et al. 2024, arXiv:2402.14740")
@dataclass(frozen=True, kw_only=True)
class RLOOEstimator(Estimator):
    """See `losses.advantages.rloo`."""

    def estimate(self, x: EstimatorInputs) -> tuple[Tensor, Tensor | None]:
        from ..advantages import rloo

        return rloo(x.rewards(), x.groups()), None


@estimator("opo", "reward minus the mean of the group, weighted by length", paper="Hao et al. 2025, arXiv:2505.23585")
@dataclass(frozen=True, kw_only=True)
class OPOEstimator(Estimator):
    """See `losses.advantages.opo`."""

    def estimate(self, x: EstimatorInputs) -> tuple[Tensor, Tensor | None]:
        from ..advantages import opo

        return opo(x.rewards(), x.groups(), x.mask), None


@estimator(
    "gpg",
    "reward minus the mean of the group, scaled up for groups of equal rewards",
    paper="Chu et al. 2025, arXiv:2504.02546",
)
@dataclass(frozen=True, kw_only=True)
class GPGEstimator(Estimator):
    """See `losses.advantages.gpg`."""

    def estimate(self, x: EstimatorInputs) -> tuple[Tensor, Tensor | None]:
        from ..advantages import grpo

        # The scale follows in `finish`: it counts the completions of all ranks.
        return grpo(x.rewards(), x.groups(), scale=False), None

    def finish(self, advantages: Tensor, x: EstimatorInputs, reduce: Reduce) -> Tensor:
        from ..advantages import gpg_scale

        return advantages * gpg_scale(x.rewards(), x.groups(), reduce=reduce).float()


algorithm(
    "pass_at_k",
    summary=_SUMMARY,
    paper=PassAtKEstimator.paper,
    loss=_PLAIN,
    advantage={"estimator": "pass_at_k"},
)
algorithm("opo", summary=_SUMMARY, paper=OPOEstimator.paper, loss=_PLAIN, advantage={"estimator": "opo"})
algorithm("gpg", paper=GPGEstimator.paper, loss={"objective": "gpg"}, advantage={"estimator": "gpg"})
algorithm("rloo", summary=_SUMMARY, paper=RLOOEstimator.paper, loss=_PLAIN, advantage={"estimator": "rloo", "kl_coef": 0.05})

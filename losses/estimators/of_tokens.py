"""Estimators with a separate advantage for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...engine.config import setting
from ..algorithms import algorithm
from ..registry import check_share
from .base import Estimator, EstimatorInputs, estimator

if TYPE_CHECKING:
    from torch import Tensor

    from ..advantages import Reduce

_GAMMA = "discount per token"
_WHITEN = "shift and scale the advantages to mean 0 and variance 1 over the tokens of a step"
# The default objective has a dual clip; these algorithms are defined without one.
_PLAIN = {"dual_clip": None}
_SUMMARY = "clipped at 0.2, mean over tokens"


@estimator(
    "gae",
    "generalized advantage estimates with a critic (lambda 0.95), whitened",
    paper="Schulman et al. 2016, arXiv:1506.02438",
)
@dataclass(frozen=True, kw_only=True)
class GAEEstimator(Estimator):
    """See `losses.advantages.gae`.

    Args:
        gamma: The discount per token.
        lam: lambda, the weight of longer estimates.
        whiten: Whether advantages get mean 0 and variance 1 over the tokens of the global batch.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"values"})
    compares: ClassVar[bool] = False

    gamma: float = setting(1.0, _GAMMA)
    lam: float = setting(0.95, "lambda of GAE; 0: one-step TD errors (low variance), 1: Monte Carlo returns (no bias)")
    whiten: bool = setting(True, _WHITEN)

    def _check_values(self) -> None:
        check_share(self, "gamma", "lam")

    def estimate(self, x: EstimatorInputs) -> tuple[Tensor, Tensor | None]:
        from ..advantages import gae

        return gae(x.token_rewards(), x.padded("values"), x.mask, self.gamma, self.lam)

    def finish(self, advantages: Tensor, x: EstimatorInputs, reduce: Reduce) -> Tensor:
        # Only advantages are whitened. Returns are the critic's targets, and keep the scale of the rewards.
        return _whitened(advantages, x, reduce) if self.whiten else advantages


@estimator("reinforce_plus_plus", "the return, whitened over the step", paper="Hu 2025, arXiv:2501.03262")
@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusEstimator(Estimator):
    """See `losses.advantages.reinforce_plus_plus`.

    Args:
        gamma: The discount per token.
        whiten: Whether advantages get mean 0 and variance 1 over the tokens of the global batch.
    """

    compares: ClassVar[bool] = False

    gamma: float = setting(1.0, _GAMMA)
    whiten: bool = setting(True, _WHITEN)

    def _check_values(self) -> None:
        check_share(self, "gamma")

    def estimate(self, x: EstimatorInputs) -> tuple[Tensor, Tensor | None]:
        from ..advantages import discounted_returns

        # There is no critic and no baseline: the advantage of a token is its return, which whitening centers.
        returns = discounted_returns(x.token_rewards(), x.mask, self.gamma)
        return returns, returns

    def finish(self, advantages: Tensor, x: EstimatorInputs, reduce: Reduce) -> Tensor:
        return _whitened(advantages, x, reduce) if self.whiten else advantages


@estimator("reinforce_plus_plus_baseline", "reward minus the mean of the group, whitened", paper="Hu 2025, arXiv:2501.03262")
@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaselineEstimator(Estimator):
    """See `losses.advantages.reinforce_plus_plus_baseline`.

    Args:
        whiten: Whether advantages get mean 0 and variance 1 over the tokens of the global batch.
    """

    whiten: bool = setting(True, _WHITEN)

    def estimate(self, x: EstimatorInputs) -> tuple[Tensor, Tensor | None]:
        from ..advantages import grpo

        # Not divided by the deviation of the group: whitening scales all tokens of the step together.
        return grpo(x.rewards(), x.groups(), scale=False), None

    def finish(self, advantages: Tensor, x: EstimatorInputs, reduce: Reduce) -> Tensor:
        return _whitened(advantages, x, reduce) if self.whiten else advantages


@estimator(
    "turn_grpo",
    "return of a turn minus the mean of the turns of the same number in the group, divided by their standard deviation; for environments",
    paper="Ding et al. 2025, arXiv:2511.14846",
)
@dataclass(frozen=True, kw_only=True)
class TurnGRPOEstimator(Estimator):
    """See `losses.advantages.turn_grpo`. A completion without turns is one turn.

    Args:
        gamma: The discount per turn.
        scale: Whether to divide by the standard deviation.
    """

    gamma: float = setting(1.0, "discount per turn")
    scale: bool = setting(True, "divide by the standard deviation of the group")

    def _check_values(self) -> None:
        check_share(self, "gamma")

    def estimate(self, x: EstimatorInputs) -> tuple[Tensor, Tensor | None]:
        from ..advantages import turn_grpo

        turns = x.padded("turns") if x.has("turns") else x.mask.long() * 0
        return turn_grpo(x.token_rewards(), turns, x.groups(), x.mask, self.gamma, scale=self.scale), None


@estimator("remax", "reward minus the reward of the greedy completion", paper="Li et al. 2024, arXiv:2310.10505")
@dataclass(frozen=True, kw_only=True)
class ReMaxEstimator(Estimator):
    """See `losses.advantages.remax`.

    Args:
        gamma: The discount per token.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"baselines"})
    compares: ClassVar[bool] = False

    gamma: float = setting(1.0, _GAMMA)

    def _check_values(self) -> None:
        check_share(self, "gamma")

    def estimate(self, x: EstimatorInputs) -> tuple[Tensor, Tensor | None]:
        from ..advantages import remax

        return remax(x.token_rewards(), x.sequence("baselines"), x.mask, self.gamma)


@estimator(
    "optimal_token_baseline",
    "return minus a baseline of each token position of the group; one more pass for the actor's distributions",
    paper="Weaver and Tao 2001, arXiv:1301.2315",
)
@dataclass(frozen=True, kw_only=True)
class OptimalTokenBaselineEstimator(Estimator):
    """See `losses.advantages.optimal_token_baseline`."""

    needs: ClassVar[frozenset[str]] = frozenset({"old_log_probs", "sum_squared_probs"})

    def estimate(self, x: EstimatorInputs) -> tuple[Tensor, Tensor | None]:
        from ..advantages import optimal_token_baseline

        # Present only if the trainer corrects for the probabilities of the generator.
        weights = x.padded("importance_weights") if x.has("importance_weights") else None
        return optimal_token_baseline(
            x.token_rewards(), x.groups(), x.padded("old_log_probs"), x.padded("sum_squared_probs"), x.mask, weights
        )


def _whitened(advantages: Tensor, x: EstimatorInputs, reduce: Reduce) -> Tensor:
    from ..advantages import whiten

    return whiten(advantages, x.mask, reduce=reduce)


algorithm(
    "reinforce_plus_plus",
    summary=_SUMMARY,
    paper=ReinforcePlusPlusEstimator.paper,
    loss=_PLAIN,
    advantage={"estimator": "reinforce_plus_plus", "kl_coef": 0.01},
)
algorithm(
    "reinforce_plus_plus_baseline",
    summary=f"{_SUMMARY}, KL (k2) 0.001",
    paper=ReinforcePlusPlusBaselineEstimator.paper,
    loss={**_PLAIN, "kl_coef": 1e-3, "kl_estimator": "k2"},
    advantage={"estimator": "reinforce_plus_plus_baseline"},
)
algorithm(
    "remax", summary=_SUMMARY, paper=ReMaxEstimator.paper, loss=_PLAIN, advantage={"estimator": "remax", "kl_coef": 0.05}
)
algorithm(
    "optimal_token_baseline",
    summary=_SUMMARY,
    paper=OptimalTokenBaselineEstimator.paper,
    loss=_PLAIN,
    advantage={"estimator": "optimal_token_baseline"},
)

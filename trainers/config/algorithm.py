"""Settings of an algorithm's loss and advantages.

Settings that belong to a single objective or estimator are added from its registration (`losses.registry`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from ...engine.config import Settings, setting
from ...losses.algorithms import ALGORITHMS
from ...losses.estimators.base import ESTIMATORS
from ...losses.names import Aggregation, KLEstimator
from ...losses.objectives.base import OBJECTIVES
from ...losses.registry import with_settings_of

if TYPE_CHECKING:
    AlgorithmName: TypeAlias = str
else:
    AlgorithmName = Literal[tuple(ALGORITHMS.all())]


@dataclass(frozen=True, kw_only=True)
@with_settings_of(OBJECTIVES, "objective")
class PolicyLossConfig(Settings):
    """The policy loss; see `losses.policy.PolicyLoss`. Null takes the value from rl.algorithm."""

    section: ClassVar[str] = "rl.loss"

    objective: str | None = setting(None, "loss per token")
    aggregation: Aggregation | None = setting(None, "how the token losses are averaged")
    length_norm: int | None = setting(
        None,
        "for seq-mean-token-sum-norm: number of tokens that sums are divided by; null: the maximum number of tokens of a completion, or of an episode",
    )
    entropy_coef: float | None = setting(None, "weight of the entropy bonus", most=1e6)
    kl_coef: float | None = setting(None, "weight of the KL divergence from the reference in the loss; 0: none", most=1e6)
    kl_estimator: KLEstimator | None = setting(None, "estimator of that KL divergence")


@dataclass(frozen=True, kw_only=True)
@with_settings_of(ESTIMATORS, "estimator")
class EstimatorConfig(Settings):
    """The advantage estimator. Null takes the value from rl.algorithm."""

    section: ClassVar[str] = "rl.advantage"

    estimator: str | None = setting(None, "advantage estimator")
    kl_coef: float | None = setting(None, "weight of the KL divergence from the reference in the rewards; 0: none", most=1e6)
    kl_estimator: Literal["k1", "k2", "k3", "abs"] | None = setting(None, "estimator of that KL divergence")

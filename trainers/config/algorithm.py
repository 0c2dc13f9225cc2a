"""The settings of an algorithm's loss and advantages. This module does not import torch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...engine.config import Settings, setting
from ...losses.names import Aggregation, Estimator, KLEstimator, Objective, Ratio

AlgorithmName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
    "pass_at_k",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "ppo",
    "online_dpo",
]


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(Settings):
    """The loss of the policy; see `losses.policy.PolicyLoss`. Null takes the value of rl.algorithm."""

    section: ClassVar[str] = "rl.loss"

    objective: Objective | None = setting(None, "loss of a token, a function of losses.objectives; clipped: PPO's")
    clip_low: float | None = setting(
        None, "distance below 1 at which the ratio is clipped; gmpo: below a log-ratio of 0; dppo: a divergence"
    )
    clip_high: float | None = setting(None, "distance above 1 at which the ratio is clipped; gmpo and dppo as for clip_low")
    tau_positive: float | None = setting(None, "sapo: how soon the gradient fades where the advantage is positive")
    tau_negative: float | None = setting(None, "sapo: how soon it fades elsewhere")
    max_ratio: float | None = setting(None, "dppo_tv, dppo_kl: largest weight of a token")
    cov_fraction: float | None = setting(None, "clip_cov, kl_cov: share of the tokens of a step that is selected")
    cov_bounds: tuple[float, float] | None = setting(None, "clip_cov: covariances between which tokens are selected")
    cov_coef: float | None = setting(None, "kl_cov: weight of the penalty of selected tokens")
    dual_clip: float | None = setting(None, "bound on the ratio where the advantage is negative; 0: none")
    ratio: Ratio | None = setting(None, "what the ratio is taken over")
    aggregation: Aggregation | None = setting(None, "how the losses of tokens are averaged")
    length_norm: int | None = setting(
        None, "for seq-mean-token-sum-norm: number of tokens that sums are divided by; null: rollout.max_tokens"
    )
    entropy_coef: float | None = setting(None, "weight of the entropy bonus", most=1e6)
    kl_coef: float | None = setting(None, "weight of the KL divergence from the reference in the loss; 0: none", most=1e6)
    kl_estimator: KLEstimator | None = setting(None, "estimator of that KL divergence")


@dataclass(frozen=True, kw_only=True)
class EstimatorConfig(Settings):
    """How advantages are computed. Null takes the value of rl.algorithm."""

    section: ClassVar[str] = "rl.advantage"

    estimator: Estimator | None = setting(None, "estimator of the advantages")
    scale: bool | None = setting(None, "grpo, pass_at_k: divide by the standard deviation of the group")
    whiten: bool | None = setting(
        None, "gae, reinforce_plus_plus: shift and scale the advantages to mean 0 and variance 1 over the tokens of a step"
    )
    gamma: float | None = setting(None, "discount per token")
    lam: float | None = setting(None, "lambda of gae")
    kl_coef: float | None = setting(None, "weight of the KL divergence from the reference in the rewards; 0: none", most=1e6)
    kl_estimator: Literal["k1", "k2", "k3", "abs"] | None = setting(None, "estimator of that KL divergence")

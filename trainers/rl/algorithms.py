"""Algorithms: each is the settings of one loss and one estimator of advantages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from ...engine.errors import ConfigError
from ...losses.importance import rejection_bounds
from ...losses.policy import POLICY_LOSSES, PolicyLoss
from ...losses.preference import PreferenceLoss
from ...workers.roles.advantage import AdvantageConfig
from ..config.algorithm import AlgorithmName, EstimatorConfig, PolicyLossConfig
from ..config.rl import RLConfig, RLSettings
from ..methods.preference import preference_loss


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm.

    Args:
        loss: The loss of the policy.
        advantage: How advantages are computed; None for a loss that compares pairs of answers.
        dynamic_sampling: Whether groups of equal rewards are replaced.
    """

    loss: PolicyLoss | PreferenceLoss
    advantage: AdvantageConfig | None = field(default_factory=AdvantageConfig)
    dynamic_sampling: bool = False

    @property
    def loss_text(self) -> str:
        """The loss, for people."""
        return _text(self.loss, ("kind", "objective", "ratio", "aggregation"), ("on_policy", "log_entropy", "linear"))

    @property
    def advantage_text(self) -> str:
        """The estimator of advantages, for people."""
        assert self.advantage is not None
        return _text(self.advantage, ("estimator", *READ_BY[self.advantage.estimator]), ())

    @property
    def needs_critic(self) -> bool:
        """Whether it uses the values of a critic."""
        return self.advantage is not None and self.advantage.estimator == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether it uses the log-probabilities of a reference."""
        if isinstance(self.loss, PreferenceLoss):
            return self.loss.needs_reference
        return bool(self.loss.kl_coef) or bool(self.advantage is not None and self.advantage.kl_coef)

    @property
    def needs_squared_probs(self) -> bool:
        """Whether it uses the sums of squared probabilities of the policy that answered."""
        return self.advantage is not None and self.advantage.estimator == "optimal_token_baseline"

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether it uses the log-probabilities from before the update beyond the ratio, which is 1 in a single update."""
        by_covariance = isinstance(self.loss, PolicyLoss) and self.loss.selects_by_covariance
        return by_covariance or self.needs_squared_probs or bool(self.advantage is not None and self.advantage.kl_coef)

    @property
    def needs_baselines(self) -> bool:
        """Whether it compares each answer with the most likely one."""
        return self.advantage is not None and self.advantage.estimator == "remax"


READ_BY: Mapping[str, tuple[str, ...]] = {
    "gae": ("gamma", "lam", "whiten"),
    "grpo": ("scale",),
    "pass_at_k": ("scale",),
    "rloo": (),
    "opo": (),
    "gpg": (),
    "optimal_token_baseline": (),
    "reinforce_plus_plus": ("gamma", "whiten"),
    "reinforce_plus_plus_baseline": ("whiten",),
    "remax": ("gamma",),
}
"""The settings of `AdvantageConfig` that only some estimators read."""
_CLIPS = frozenset({"clip_low", "clip_high"})
READ_BY_OBJECTIVE: Mapping[str, frozenset[str]] = {
    "clipped": _CLIPS | {"dual_clip", "ratio"},
    "cispo": _CLIPS,
    "gpg": frozenset(),
    "sapo": frozenset({"tau_positive", "tau_negative"}),
    "dppo_tv": _CLIPS | {"max_ratio"},
    "dppo_kl": _CLIPS | {"max_ratio"},
    "gmpo": _CLIPS,
    "clip_cov": _CLIPS | {"cov_fraction", "cov_bounds"},
    "kl_cov": frozenset({"cov_fraction", "cov_coef"}),
}
"""The settings of `PolicyLoss` that only some objectives read."""
_PLAIN = PolicyLoss(dual_clip=None)
_GROUPED = AdvantageConfig(estimator="grpo")
ALGORITHMS: Mapping[AlgorithmName, Algorithm] = {
    "grpo": Algorithm(loss=POLICY_LOSSES["grpo"], advantage=AdvantageConfig(estimator="grpo")),
    "dr_grpo": Algorithm(
        # The constant that sums are divided by is the limit of an answer's length, which `resolve` fills in.
        loss=replace(POLICY_LOSSES["dr_grpo"], aggregation="seq-mean-token-sum-norm", length_norm=1),
        advantage=AdvantageConfig(estimator="grpo", scale=False),
    ),
    "dapo": Algorithm(loss=POLICY_LOSSES["dapo"], advantage=AdvantageConfig(estimator="grpo"), dynamic_sampling=True),
    "gspo": Algorithm(loss=POLICY_LOSSES["gspo"], advantage=AdvantageConfig(estimator="grpo")),
    "cispo": Algorithm(loss=POLICY_LOSSES["cispo"], advantage=AdvantageConfig(estimator="grpo")),
    **{
        name: Algorithm(loss=POLICY_LOSSES[name], advantage=_GROUPED)
        for name in get_args(AlgorithmName)
        if name in ("sapo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
    },
    "pass_at_k": Algorithm(loss=_PLAIN, advantage=AdvantageConfig(estimator="pass_at_k")),
    "opo": Algorithm(loss=_PLAIN, advantage=AdvantageConfig(estimator="opo")),
    "gpg": Algorithm(loss=POLICY_LOSSES["gpg"], advantage=AdvantageConfig(estimator="gpg")),
    "optimal_token_baseline": Algorithm(loss=_PLAIN, advantage=AdvantageConfig(estimator="optimal_token_baseline")),
    "rloo": Algorithm(loss=_PLAIN, advantage=AdvantageConfig(estimator="rloo", kl_coef=0.05)),
    "reinforce_plus_plus": Algorithm(loss=_PLAIN, advantage=AdvantageConfig(estimator="reinforce_plus_plus", kl_coef=0.01)),
    "reinforce_plus_plus_baseline": Algorithm(
        loss=replace(_PLAIN, kl_coef=1e-3, kl_estimator="k2"),
        advantage=AdvantageConfig(estimator="reinforce_plus_plus_baseline"),
    ),
    "remax": Algorithm(loss=_PLAIN, advantage=AdvantageConfig(estimator="remax", kl_coef=0.05)),
    "ppo": Algorithm(loss=POLICY_LOSSES["ppo"], advantage=AdvantageConfig(estimator="gae", kl_coef=0.05)),
    "online_dpo": Algorithm(loss=PreferenceLoss(), advantage=None),
}
"""The algorithms, with the settings of their papers or, where these say nothing, of common implementations.

Source: grpo to kl_cov and gpg: see `losses.policy.POLICY_LOSSES`; pass_at_k, opo, optimal_token_baseline: see
`losses.advantages`; DAPO's dynamic sampling Yu et al. 2025,
arXiv:2503.14476, section 3.2. RLOO Ahmadian et al. 2024, arXiv:2402.14740; REINFORCE++ and its form with a group baseline Hu 2025,
arXiv:2501.03262; ReMax Li et al. 2024, arXiv:2310.10505; PPO Schulman et al. 2017, arXiv:1707.06347; online DPO Guo et al. 2024,
arXiv:2402.04792, with the best and the worst answer of a group as a pair.
"""


def resolve(config: RLConfig) -> Algorithm:
    """Return the algorithm of a run: that of `rl.algorithm`, with what the settings change.

    Args:
        config: The run's settings.

    Raises:
        ConfigError: A setting is out of range, or does not apply to the algorithm.
    """
    rl = config.rl
    known = ALGORITHMS[rl.algorithm]
    if isinstance(known.loss, PreferenceLoss):
        pairs = preference_loss(config.dpo, config.rollout.temperature)
        if pairs.needs_matching:
            raise ConfigError(
                "dpo.loss=aot with rl.algorithm=online_dpo: it compares distributions over many pairs of known answers; use it with "
                "drivetrain dpo, or another loss"
            )
        return replace(known, loss=pairs)
    assert known.advantage is not None
    changes = _given(rl.loss)
    objective = changes.get("objective", known.loss.objective)
    elsewhere = frozenset().union(*READ_BY_OBJECTIVE.values()) - READ_BY_OBJECTIVE[objective]
    if unread := sorted(name for name in changes if name in elsewhere and changes[name] != 0):
        raise ConfigError(
            f"rl.loss.{unread[0]}={changes[unread[0]]} is not used by the objective {objective} of rl.algorithm={rl.algorithm}; "
            "remove it"
        )
    if changes.get("dual_clip") == 0 or (objective != "clipped" and "dual_clip" not in changes):
        changes["dual_clip"] = None
    if "cov_bounds" in changes:
        changes["cov_bounds"] = tuple(changes["cov_bounds"])
    aggregation = changes.pop("aggregation", known.loss.aggregation)
    norm = changes.pop("length_norm", config.rollout.max_tokens)
    by_norm = aggregation == "seq-mean-token-sum-norm"
    if not (config.rollout.temperature > 0 and math.isfinite(config.rollout.temperature)):
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature}; it must be a finite number above 0, for answers that differ from each other"
        )
    try:
        loss = replace(
            known.loss,
            aggregation=aggregation,
            length_norm=norm if by_norm or rl.loss.length_norm is not None else None,
            temperature=config.rollout.temperature,
            **changes,
        )
    except ConfigError as e:
        none = "; 0 is none" if "dual_clip" in str(e) else ""
        raise ConfigError(f"rl.loss.{e} (rl.algorithm={rl.algorithm}{none})") from e
    estimator = _given(rl.advantage)
    if "kl_estimator" in estimator:
        estimator["kl"] = estimator.pop("kl_estimator")
    try:
        advantage = replace(known.advantage, **estimator)
    except ConfigError as e:
        raise ConfigError(f"rl.advantage.{e}") from e
    read = {"estimator", "kl_coef", *READ_BY[advantage.estimator], *(["kl"] if advantage.kl_coef else [])}
    if unread := sorted(set(estimator) - read):
        name = unread[0].replace("kl", "kl_estimator")
        raise ConfigError(
            f"rl.advantage.{name}={estimator[unread[0]]} is not used by the estimator {advantage.estimator} of rl.algorithm="
            f"{rl.algorithm} with rl.advantage.kl_coef={advantage.kl_coef:g}; remove it"
        )
    if advantage.estimator == "optimal_token_baseline" and rl.old_log_probs == "rollout":
        raise ConfigError(
            "rl.old_log_probs=rollout with the estimator optimal_token_baseline, which needs the actor's distributions; set "
            "rl.old_log_probs=actor"
        )
    for kind, limit in rl.rejection.items():
        try:
            rejection_bounds(kind, limit)
        except ConfigError as e:
            raise ConfigError(f"rl.{e}") from e
    dynamic = known.dynamic_sampling if rl.dynamic_sampling is None else rl.dynamic_sampling
    if not dynamic and rl.max_resamples != RLSettings().max_resamples:
        raise ConfigError(
            f"rl.max_resamples={rl.max_resamples} is not used without rl.dynamic_sampling=true; set that, or remove it"
        )
    return Algorithm(loss=loss, advantage=advantage, dynamic_sampling=dynamic)


def _text(settings: PolicyLoss | PreferenceLoss | AdvantageConfig, always: Sequence[str], never: Sequence[str]) -> str:
    """Return those settings that are named, and those that are not at their defaults."""
    shown = [
        f"{f.name}={value}"
        for f in fields(settings)
        if f.name not in never and ((value := getattr(settings, f.name)) != f.default or f.name in always)
    ]
    return ", ".join(shown)


def _given(settings: PolicyLossConfig | EstimatorConfig) -> dict[str, Any]:
    return {f.name: value for f in fields(settings) if (value := getattr(settings, f.name)) is not None}

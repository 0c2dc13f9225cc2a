"""Algorithms: each combines the settings of a loss and an advantage estimator."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ...engine.errors import ConfigError
from ...losses.algorithms import ALGORITHMS
from ...losses.importance import rejection_bounds
from ...losses.policy import PolicyLoss
from ...losses.preference import PreferenceLoss
from ...workers.roles.advantage import AdvantageConfig
from ..config.algorithm import EstimatorConfig, PolicyLossConfig
from ..config.rl import RLConfig, RLSettings
from ..methods.preference import preference_loss


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm.

    Args:
        loss: The policy loss.
        advantage: The advantage estimator; None for a loss that compares pairs of completions.
        dynamic_sampling: Whether groups with equal rewards are replaced.
    """

    loss: PolicyLoss | PreferenceLoss
    advantage: AdvantageConfig | None = field(default_factory=AdvantageConfig)
    dynamic_sampling: bool = False

    @property
    def loss_text(self) -> str:
        """A description of the loss."""
        if isinstance(self.loss, PreferenceLoss):
            return _text(vars(self.loss), vars(PreferenceLoss()), ("kind",))
        return _text(self.loss.settings(), self.loss.defaults(), ("objective", "ratio", "aggregation"))

    @property
    def advantage_text(self) -> str:
        """A description of the advantage estimator."""
        assert self.advantage is not None
        names = [f.name for f in fields(self.advantage.estimator)]
        return _text(self.advantage.settings(), self.advantage.defaults(), ("estimator", *names))

    @property
    def needs_critic(self) -> bool:
        """Whether it uses the values of a critic."""
        return self._needs("values")

    @property
    def needs_reference(self) -> bool:
        """Whether it uses the log-probabilities of a reference."""
        if isinstance(self.loss, PreferenceLoss):
            return self.loss.needs_reference
        return bool(self.loss.kl_coef) or bool(self.advantage is not None and self.advantage.kl_coef)

    @property
    def needs_squared_probs(self) -> bool:
        """Whether it uses the sums of squared probabilities of the policy that generated the completions."""
        return self._needs("sum_squared_probs")

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether it uses the log-probabilities from before the update beyond the ratio, which is 1 in a single update."""
        selects = isinstance(self.loss, PolicyLoss) and self.loss.objective.selection is not None
        return selects or self._needs("old_log_probs") or bool(self.advantage is not None and self.advantage.kl_coef)

    @property
    def needs_baselines(self) -> bool:
        """Whether it compares each completion with the greedy one."""
        return self._needs("baselines")

    def _needs(self, name: str) -> bool:
        return self.advantage is not None and name in self.advantage.estimator.needs


def published(name: str) -> Algorithm:
    """Return a registered algorithm with the settings of its registration.

    Args:
        name: Its name, a value of `rl.algorithm`.

    Raises:
        ConfigError: There is no algorithm of this name.
    """
    spec = ALGORITHMS.get(name)
    if spec.loss is None or spec.advantage is None:
        return Algorithm(loss=PreferenceLoss(), advantage=None, dynamic_sampling=spec.dynamic_sampling)
    return Algorithm(
        loss=PolicyLoss.from_settings(**spec.loss),
        advantage=AdvantageConfig.from_settings(**spec.advantage),
        dynamic_sampling=spec.dynamic_sampling,
    )


def resolve(config: RLConfig) -> Algorithm:
    """Return the algorithm of a run: that of `rl.algorithm`, changed by the other settings.

    Args:
        config: The run's settings.

    Raises:
        ConfigError: A setting is out of range, or does not apply to the algorithm.
    """
    rl = config.rl
    registered = published(rl.algorithm)
    if isinstance(registered.loss, PreferenceLoss):
        pairs = preference_loss(config.dpo, config.rollout.temperature)
        if pairs.needs_matching:
            raise ConfigError(
                "dpo.loss=aot with rl.algorithm=online_dpo: it compares distributions over many pairs of a fixed dataset; use it with "
                "drivetrain dpo, or another loss"
            )
        return replace(registered, loss=pairs)
    assert registered.advantage is not None
    # First the loss: settings that are set replace those of the registered algorithm.
    changes = _set_by_hand(rl.loss)
    aggregation = changes.get("aggregation", registered.loss.aggregation)
    norm = changes.get("length_norm", config.max_answer_tokens)
    by_norm = aggregation == "seq-mean-token-sum-norm"
    if not (config.rollout.temperature > 0 and math.isfinite(config.rollout.temperature)):
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature}; it must be a finite number above 0, so that completions differ from each other"
        )
    of_run = {
        "length_norm": norm if by_norm or rl.loss.length_norm is not None else None,
        "temperature": config.rollout.temperature,
    }
    try:
        loss = registered.loss.with_settings(**{**changes, **of_run})
    except ConfigError as e:
        raise ConfigError(f"rl.loss.{e} (rl.algorithm={rl.algorithm})") from e
    # A 0 turns a term off, so it is right for an objective that does not have the term.
    if unread := sorted(name for name in changes if name not in loss.settings() and changes[name] != 0):
        raise ConfigError(
            f"rl.loss.{unread[0]}={changes[unread[0]]} is not used by the objective {loss.objective.name} of rl.algorithm={rl.algorithm}; "
            "remove it"
        )
    # Another objective may ignore the algorithm's bounds, but not the definition of its ratio.
    for name, value in (ALGORITHMS.get(rl.algorithm).loss or {}).items():
        if isinstance(value, str) and name not in loss.settings():
            raise ConfigError(
                f"rl.loss.objective={loss.objective.name} does not use {name}={value}, which rl.algorithm={rl.algorithm} sets; choose "
                "another algorithm"
            )
    # Then the estimator, in the same way.
    changes = _set_by_hand(rl.advantage)
    if "kl_estimator" in changes:
        changes["kl"] = changes.pop("kl_estimator")
    try:
        advantage = registered.advantage.with_settings(**changes)
    except ConfigError as e:
        raise ConfigError(f"rl.advantage.{e}") from e
    # Without a KL penalty in the rewards, nothing estimates a KL divergence for them.
    read = advantage.settings().keys() - (set() if advantage.kl_coef else {"kl"})
    if unread := sorted(changes.keys() - read):
        name = unread[0].replace("kl", "kl_estimator")
        raise ConfigError(
            f"rl.advantage.{name}={changes[unread[0]]} is not used by the estimator {advantage.estimator.name} of rl.algorithm="
            f"{rl.algorithm} with rl.advantage.kl_coef={advantage.kl_coef:g}; remove it"
        )
    if "sum_squared_probs" in advantage.estimator.needs and rl.old_log_probs == "rollout":
        raise ConfigError(
            f"rl.old_log_probs=rollout with the estimator {advantage.estimator.name}, which needs the actor's distributions; set "
            "rl.old_log_probs=actor"
        )
    # Called only for its checks; the bounds are computed again where they are used.
    for kind, limit in rl.rejection.items():
        try:
            rejection_bounds(kind, limit)
        except ConfigError as e:
            raise ConfigError(f"rl.{e}") from e
    dynamic = registered.dynamic_sampling if rl.dynamic_sampling is None else rl.dynamic_sampling
    if not dynamic and rl.max_resamples != RLSettings().max_resamples:
        raise ConfigError(
            f"rl.max_resamples={rl.max_resamples} is not used without rl.dynamic_sampling=true; set that, or remove it"
        )
    return Algorithm(loss=loss, advantage=advantage, dynamic_sampling=dynamic)


def _text(settings: Mapping[str, Any], defaults: Mapping[str, Any], always: Collection[str]) -> str:
    """Format the settings in `always`, and those that differ from their defaults."""
    return ", ".join(f"{name}={value}" for name, value in settings.items() if name in always or value != defaults[name])


def _set_by_hand(settings: PolicyLossConfig | EstimatorConfig) -> dict[str, Any]:
    return {f.name: value for f in fields(settings) if (value := getattr(settings, f.name)) is not None}

"""Values that a run adapts from step to step: the weight of the KL penalty, and the scale of the rewards. Checkpoints store their state."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...engine.errors import ConfigError
from ...losses.policy import PolicyLoss
from ..config.rl import RLSettings
from .algorithms import Algorithm

_MOST = 0.2
"""The clipping bound of the proportional error of the KL divergence, as in the paper."""
_EPS = 1e-8


class Adaptive:
    """The adapted settings of a run.

    Args:
        settings: The settings of the algorithm.
        algorithm: The algorithm.

    Raises:
        ConfigError: `rl.kl_target` is set, but there is no KL penalty, or there are two.
    """

    def __init__(self, settings: RLSettings, algorithm: Algorithm) -> None:
        self._settings, self._algorithm = settings, algorithm
        in_loss = algorithm.loss.kl_coef if isinstance(algorithm.loss, PolicyLoss) else 0.0
        in_rewards = 0.0 if algorithm.advantage is None else algorithm.advantage.kl_coef
        if settings.kl_target is not None and bool(in_loss) == bool(in_rewards):
            raise ConfigError(
                f"rl.kl_target={settings.kl_target} adapts the weight of one KL penalty, but rl.loss.kl_coef={in_loss} and "
                f"rl.advantage.kl_coef={in_rewards}; set one of them"
            )
        self._in_loss = bool(in_loss)
        self._coef = in_loss or in_rewards
        self._in_rewards = in_rewards
        self._count, self._mean, self._squares = 0, 0.0, 0.0
        self._shift, self._scale = 0.0, 1.0

    @property
    def kl_coef(self) -> float:
        """The weight of the KL penalty in the rewards."""
        return self._in_rewards if self._in_loss else self._coef

    @property
    def loss(self) -> PolicyLoss | None:
        """The loss with the adapted weight of its KL term; None if it is that of the algorithm."""
        if self._settings.kl_target is None or not self._in_loss:
            return None
        assert isinstance(self._algorithm.loss, PolicyLoss)
        return replace(self._algorithm.loss, kl_coef=self._coef)

    def adapt_kl(self, measured: float | None, completions: int) -> None:
        """Adapt the weight of the KL penalty.

        Args:
            measured: The KL divergence per completion in this step, in nats; None if it was not measured.
            completions: The number of completions in this step.

        Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
        """
        target = self._settings.kl_target
        if target is None or measured is None or not math.isfinite(measured):
            return
        # A step with more completions than the horizon counts as one horizon. Otherwise one with more than
        # five times as many could make the weight negative.
        error = min(max(measured / target - 1, -_MOST), _MOST)
        self._coef *= 1 + error * min(1.0, completions / self._settings.kl_horizon)

    def shape_rewards(self, rewards: Sequence[float]) -> list[float]:
        """Return the rewards of a step's completions, scaled and clipped according to the settings."""
        kind = self._settings.reward_norm
        if kind == "batch":
            mean = sum(rewards) / max(1, len(rewards))
            squares = sum((reward - mean) ** 2 for reward in rewards)
            # Kept for `scale_baselines`: a baseline must be on the scale of the rewards that it is compared with.
            self._shift, self._scale = mean, _deviation(squares, len(rewards))
        elif kind == "running":
            # Welford 1962: accumulates squared distances from a running mean, without cancellation.
            for reward in rewards:
                self._count += 1
                distance = reward - self._mean
                self._mean += distance / self._count
                self._squares += distance * (reward - self._mean)
            self._shift, self._scale = self._mean, _deviation(self._squares, self._count)
        return self.scale_baselines(rewards)

    def scale_baselines(self, rewards: Sequence[float]) -> list[float]:
        """Return other rewards on the scale of the last call of `shape_rewards`."""
        clip = math.inf if self._settings.reward_clip is None else self._settings.reward_clip
        return [min(max((reward - self._shift) / self._scale, -clip), clip) for reward in rewards]

    def metrics(self) -> dict[str, float]:
        """Return the weight of the KL penalty, if there is one."""
        return {"kl_coef": self._coef} if self._coef else {}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"kl_coef": self._coef, "count": self._count, "mean": self._mean, "squares": self._squares}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. A weight that is not adapted keeps its value from the settings."""
        # The setting may have been changed for the resumed run.
        if self._settings.kl_target is not None:
            self._coef = float(state.get("kl_coef", self._coef))
        self._count, self._mean = int(state.get("count", 0)), float(state.get("mean", 0.0))
        self._squares = float(state.get("squares", 0.0))


def _deviation(squares: float, count: int) -> float:
    """Return a standard deviation that is safe to divide by: 1 if all values are equal."""
    # The estimate of a sample, with one degree of freedom used by the mean.
    deviation = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
    return deviation + _EPS if deviation > _EPS else 1.0

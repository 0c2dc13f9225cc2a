"""Which evaluation was the best, and whether it is time to stop. Pure: numbers in, decisions out."""

import math
from collections.abc import Mapping
from typing import Any

from ...engine.errors import ConfigError


class EarlyStopping:
    """Follows one metric over evaluations.

    Args:
        metric: its name, or None: nothing is followed.
        patience: evaluations without a better value after which to stop; None: never.
        data: what is evaluated on: values on other data are no measure.
        lower_is_better: what an evaluation measures, and whether less of it is better.

    Raises:
        ConfigError: there is no such metric, or patience without one.
    """

    def __init__(self, metric: str | None, patience: int | None, data: str, lower_is_better: Mapping[str, bool]) -> None:
        if metric is not None and metric not in lower_is_better:
            raise ConfigError(f"trainer.best_metric={metric}; an evaluation measures {', '.join(lower_is_better)}")
        if patience is not None and metric is None:
            raise ConfigError(f"trainer.patience={patience} needs trainer.best_metric, the metric that has to get better")
        self.metric, self._patience, self._data, self._lower = metric, patience, data, lower_is_better
        self.best: float | None = None
        self.best_step: int | None = None
        self._since = 0

    def update(self, step: int, measured: Mapping[str, float]) -> bool:
        """Take an evaluation; whether it is the best so far. NaN never is."""
        if self.metric is None:
            return False
        value = measured[self.metric]
        lower = self._lower[self.metric]
        better = not math.isnan(value) and (self.best is None or (value < self.best if lower else value > self.best))
        self._since = 0 if better else self._since + 1
        if better:
            self.best, self.best_step = value, step
        return better

    @property
    def stop(self) -> bool:
        """Whether `patience` evaluations brought nothing better."""
        return self._patience is not None and self._since >= self._patience

    def reset(self) -> None:
        """Begin anew."""
        self.best, self.best_step, self._since = None, None, 0

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "metric": self.metric,
            "data": self._data,
            "best": self.best,
            "best_step": self.best_step,
            "since": self._since,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint; what was known of another metric, or of other data, is forgotten."""
        if (state.get("metric"), state.get("data")) == (self.metric, self._data):
            self.best, self.best_step, self._since = state["best"], state["best_step"], int(state["since"])

"""Tracking of the best evaluation and early stopping: metrics in, decisions out."""

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any, Self

from ...engine.errors import ConfigError
from ..config.trainer import LoopConfig

log = logging.getLogger(__name__)


class EarlyStopping:
    """Tracker of one metric across evaluations.

    Args:
        metric: The name of the metric, or None to track nothing.
        patience: The number of evaluations without a better value after which to stop; None to disable.
        threshold: The value of the metric at which to stop; None to disable.
        data: An identifier of the evaluation data, since values on other data are not comparable.
        lower_is_better: The metrics that an evaluation measures, and for each whether lower values are better.

    Raises:
        ConfigError: The metric is unknown, or there is patience or a threshold without a metric.
    """

    def __init__(
        self,
        metric: str | None,
        patience: int | None,
        data: str,
        lower_is_better: Mapping[str, bool],
        threshold: float | None = None,
    ) -> None:
        if metric is not None and metric not in lower_is_better:
            raise ConfigError(f"trainer.best_metric={metric}; the metrics of an evaluation are {', '.join(lower_is_better)}")
        if patience is not None and metric is None:
            raise ConfigError(
                f"trainer.patience={patience} needs trainer.best_metric, the metric that has to improve; set it (for example to loss), or remove trainer.patience"
            )
        if threshold is not None and metric is None:
            raise ConfigError(
                f"trainer.stopping_threshold={threshold} needs trainer.best_metric, the metric that has to reach it; set it (for example to loss), or remove trainer.stopping_threshold"
            )
        self.metric, self._patience, self._data, self._lower_is_better = metric, patience, data, lower_is_better
        self._threshold = threshold
        self.best: float | None = None
        self.best_step: int | None = None
        self._since = 0

    @classmethod
    def of(cls, config: LoopConfig, lower_is_better: Mapping[str, bool], data: str = "") -> Self:
        """Return the tracker for the settings.

        Args:
            config: The `trainer` settings.
            lower_is_better: The metrics that an evaluation measures, and for each whether lower values are better.
            data: The digest of the evaluation data.

        Raises:
            ConfigError: There is no such metric.
        """
        return cls(config.best_metric, config.patience, data, lower_is_better, config.stopping_threshold)

    def update(self, step: int, measured: Mapping[str, float]) -> bool:
        """Record an evaluation and return whether it is the best so far; NaN never is.

        Args:
            step: The last completed step.
            measured: The metrics of the evaluation.

        Raises:
            ConfigError: The metric is not among them, which only a user-defined loss can cause.
        """
        if self.metric is None:
            return False
        if self.metric not in measured:
            raise ConfigError(
                f"trainer.best_metric={self.metric}, which this loss does not report; it reports {', '.join(measured)}"
            )
        value = measured[self.metric]
        lower = self._lower_is_better[self.metric]
        # NaN compares as false with every number, so as a first value it would never be replaced.
        better = not math.isnan(value) and (self.best is None or (value < self.best if lower else value > self.best))
        self._since = 0 if better else self._since + 1
        if better:
            self.best, self.best_step = value, step
        return better

    @property
    def reached(self) -> bool:
        """Whether an evaluation reached the threshold."""
        if self._threshold is None or self.metric is None or self.best is None:
            return False
        return self.best <= self._threshold if self._lower_is_better[self.metric] else self.best >= self._threshold

    def describe_reached(self, step: int) -> str:
        """Return the line to log when the threshold has ended the run."""
        return f"stopped after step {step}: {self.metric}={self.best:.4g} has reached trainer.stopping_threshold={self._threshold:g}"

    @property
    def stop(self) -> bool:
        """Whether the threshold is reached, or the last `patience` evaluations brought no improvement."""
        return self.reached or (self._patience is not None and self._since >= self._patience)

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {
            "metric": self.metric,
            "data": self._data,
            "best": self.best,
            "best_step": self.best_step,
            "since": self._since,
        }

    def restore(self, state: Mapping[str, Any], steps: Collection[int], root: str) -> None:
        """Restore the state from a checkpoint, unless it belongs to another metric or to other data.

        Args:
            state: What `state` returned.
            steps: The steps that have a checkpoint; only those can be exported.
            root: The location of the checkpoints, for messages.
        """
        # Values of another metric, or on other data, cannot be compared with those of this run.
        if (state.get("metric"), state.get("data")) == (self.metric, self._data):
            self.best, self.best_step, self._since = state["best"], state["best_step"], int(state["since"])
        if self.best_step is not None and self.best_step not in steps:
            # The state comes from another run's folder, or the checkpoint was deleted by hand.
            log.warning(
                "the checkpoint of the best %s, step %d, is not in %s; the search for the best starts over",
                self.metric,
                self.best_step,
                root,
            )
            self.best, self.best_step, self._since = None, None, 0

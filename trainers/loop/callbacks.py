"""Callbacks: user code that the training loop runs at fixed points, on every rank."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...engine.errors import ConfigError
from .ranks import TrainerRanks

StepHook = Literal["on_train_begin", "on_step_end", "on_evaluate", "on_save", "on_train_end"]


class Callback:
    """A base class whose methods the training loop calls; they do nothing unless they are overridden.

    Every rank calls them with the same arguments; `run` is an `OfflineRun` or an `RLRun`. An error on one rank ends the run on all ranks.
    A callback that calls collectives, such as those of `run.engine`, must do so on every rank.
    """

    def on_train_begin(self, run: Any, step: int) -> None:
        """Before the first step, given the number of steps that were made before this run; more than 0 if it resumes."""

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, Any]) -> bool | None:
        """After a step, with its metrics as in `metrics.jsonl`. True ends training after a checkpoint, and a later run continues."""

    def on_evaluate(self, run: Any, step: int, metrics: Mapping[str, float]) -> bool | None:
        """After an evaluation, with its metrics. True ends training after a checkpoint, and a later run continues."""

    def on_save(self, run: Any, step: int) -> None:
        """After a checkpoint was taken; it may still be written in the background."""

    def on_train_end(self, run: Any, step: int) -> None:
        """After the last step, given its number, also if a callback stopped the run; not after an error or a signal."""


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Check that callbacks are objects of the class `Callback`, and that the loop calls all of their methods `on_...`.

    Raises:
        ConfigError: One of them is not a `Callback`, or has a method that the loop never calls.
    """
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks has {callback!r}, which is not a Callback; derive its class from drivetrain.Callback"
            )
        # A misspelled method would otherwise be ignored silently.
        unknown = sorted(name for name in dir(callback) if name.startswith("on_") and name not in hooks)
        if unknown:
            raise ConfigError(
                f"{type(callback).__name__} has the method {unknown[0]}, which is never called; a Callback has {', '.join(hooks)}"
            )


def call_all(callbacks: Sequence[Callback], hook: StepHook, ranks: TrainerRanks, *args: Any) -> bool:
    """Call a method of every callback, and return whether any callback on any rank asked to stop. Collective if there are callbacks.

    Args:
        callbacks: The callbacks.
        hook: The method.
        ranks: The processes that call it.
        args: The method's arguments.

    Raises:
        Exception: A callback's error.
        RemoteError: An error of another rank.
    """
    stop = False
    for callback in callbacks:
        asked, failure = False, None
        try:
            asked = getattr(callback, hook)(*args) is True
        except Exception as e:  # raised on all ranks by the exchange
            failure = e
        # Exchange after each callback: the next one may wait in a collective for a rank that failed in this one.
        stop |= any(ranks.all_gather_object(asked, error=failure))
    return stop

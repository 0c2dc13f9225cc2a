"""Callbacks: code of a user that runs at points of the training loop, on every rank."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .loop import Run

Hook = Literal["on_train_begin", "on_step_end", "on_evaluate", "on_save", "on_train_end"]


class Callback:
    """A base class whose methods the training loop calls; they do nothing unless they are overridden.

    Every rank calls them with the same arguments. An error on one rank ends the run on all of them. To call collectives, such as
    those of `run.engine`, every rank must do so.
    """

    def on_train_begin(self, run: "Run", step: int) -> None:
        """Before the first step, given the number of steps that were made before this run; more than 0 if it resumes."""

    def on_step_end(self, run: "Run", step: int, metrics: Mapping[str, Any]) -> bool | None:
        """After a step, given what `metrics.jsonl` has of it. True ends training after a checkpoint, and a later run goes on."""

    def on_evaluate(self, run: "Run", step: int, metrics: Mapping[str, float]) -> bool | None:
        """After an evaluation, given its metrics. True ends training after a checkpoint, and a later run goes on."""

    def on_save(self, run: "Run", step: int) -> None:
        """After a checkpoint was taken; it may still be written in the background."""

    def on_train_end(self, run: "Run", step: int) -> None:
        """After the last step, given its number, also if a callback stopped the run; not after an error or a signal."""


def notify(run: "Run", hook: Hook, step: int, *args: Any) -> bool:
    """Call a method of every callback, and tell whether any of them asked to stop, on any rank. Collective if there are callbacks.

    Args:
        run: What is being trained.
        hook: The method.
        step: The last completed step.
        args: The method's further arguments.

    Raises:
        Exception: A callback's error.
        RemoteError: That of another rank.
    """
    if not run.callbacks:
        return False
    stop = False
    for callback in run.callbacks:
        asked, failure = False, None
        try:
            asked = getattr(callback, hook)(run, step, *args) is True
        except Exception as e:  # raised on all ranks by the exchange
            failure = e
        # After each of them: the next one may wait in a collective for a rank that has failed in this one.
        stop |= any(run.engine.topology.all_gather_object(asked, error=failure))
    return stop

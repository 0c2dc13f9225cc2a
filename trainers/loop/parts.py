"""What a training run is made of, and the callbacks: code of a user that runs at points of the loop, on every rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...engine.base import BaseEngine
from ...engine.checkpoint.manager import CheckpointManager
from ..config.trainer import TrainerConfig
from ..data.loader import Batches, Loader
from ..methods.base import TrainingMethod
from .answer_metrics import AnswerMetrics
from .early_stopping import EarlyStopping
from .loggers import Logger
from .samples import HeldOutCompletion
from .signals import StopSignal

StepHook = Literal["on_train_begin", "on_step_end", "on_evaluate", "on_save", "on_train_end"]


class Callback:
    """A base class whose methods the training loop calls; they do nothing unless they are overridden.

    Every rank calls them with the same arguments. An error on one rank ends the run on all of them. To call collectives, such as
    those of `run.engine`, every rank must do so.
    """

    def on_train_begin(self, run: "TrainingRun", step: int) -> None:
        """Before the first step, given the number of steps that were made before this run; more than 0 if it resumes."""

    def on_step_end(self, run: "TrainingRun", step: int, metrics: Mapping[str, Any]) -> bool | None:
        """After a step, given what `metrics.jsonl` has of it. True ends training after a checkpoint, and a later run goes on."""

    def on_evaluate(self, run: "TrainingRun", step: int, metrics: Mapping[str, float]) -> bool | None:
        """After an evaluation, given its metrics. True ends training after a checkpoint, and a later run goes on."""

    def on_save(self, run: "TrainingRun", step: int) -> None:
        """After a checkpoint was taken; it may still be written in the background."""

    def on_train_end(self, run: "TrainingRun", step: int) -> None:
        """After the last step, given its number, also if a callback stopped the run; not after an error or a signal."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation that runs every `trainer.eval_every` steps.

    Args:
        loader: The held-out samples.
        answers: A function of the stop signal that returns the model's answers to some of the samples; None if a signal came
            before they were complete. Collective.
        metrics: The metrics of the answers.
    """

    loader: Loader
    answers: Callable[[StopSignal], Sequence[HeldOutCompletion] | None]
    metrics: AnswerMetrics


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Everything that training needs.

    Args:
        engine: The engine, initialized or resumed.
        method: The training method: the loss to minimize, and the preparation of batches for it.
        loader: The training samples.
        evaluation: The held-out samples; None without evaluations.
        manager: The run's checkpoints.
        config: The `trainer` settings, such as how often to evaluate and save.
        loggers: The loggers, on the first rank; empty elsewhere.
        early_stopping: The tracker of the best evaluation.
        export: A function of the step that exports the current model. Collective.
        total_steps: The number of the last step.
        peak_flops: The peak FLOP/s of all devices together; None if it is not known.
        callbacks: Code of the user, called on every rank.
    """

    engine: BaseEngine
    method: TrainingMethod
    loader: Batches
    evaluation: Evaluation | None
    manager: CheckpointManager
    config: TrainerConfig
    loggers: Sequence[Logger]
    early_stopping: EarlyStopping
    export: Callable[[int], object]
    total_steps: int
    peak_flops: float | None
    callbacks: Sequence[Callback] = ()


def notify(run: TrainingRun, hook: StepHook, step: int, *args: Any) -> bool:
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

"""The training loop of every trainer: steps, evaluations, checkpoints and exports, until the run ends."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ...engine.checkpoint.retention import folder_name
from .signals import StopSignal
from .training_run import TrainingRun


class StopReason(Enum):
    """The reason why training ended."""

    DONE = "all steps are done"
    PATIENCE = "`trainer.patience` evaluations without an improvement"
    THRESHOLD = "`trainer.stopping_threshold` is reached"
    TIME = "`trainer.max_minutes` have passed"
    CALLBACK = "a callback asked to stop"
    SIGNAL = "SIGTERM or Ctrl-C"


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The end of a run.

    Args:
        step: The last completed step.
        reason: The reason why no further step was taken.
        signal: The signal that ended the run, if this process received it.
        evaluation: The metrics of the last evaluation.
        outputs: The location of each output, by name.
    """

    step: int
    reason: StopReason
    signal: int | None = None
    evaluation: Mapping[str, float] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)


def train(run: TrainingRun) -> TrainResult:
    """Train, evaluate, log and save until the run ends. Collective.

    Args:
        run: The run, at its beginning or resumed.
    """
    config = run.config
    with StopSignal(run.ranks, config.max_minutes) as stop:
        run.notify("on_train_begin")
        # Before the first step, or because the checkpoint was saved before its evaluation was complete.
        is_best = evaluate(run, stop) if run.evaluates_first and run.has_evaluation else None
        stop.exchange()
        reason = stop_reason(run, stop)
        # The resumed checkpoint says that the evaluation is due, so save again once it is done.
        if is_best is not None and (is_best or reason is not None or run.step):
            run.save(last=reason is not None)
        while reason is None:
            record = run.make_step()
            # Only the first rank logs, and a background save can fail on any rank. The exchange below raises such
            # errors on all ranks, and agrees on signals, so that no rank begins a step or a save alone.
            error = run.log(record)
            run.notify("on_step_end", record)
            is_best = evaluate(run, stop) if run.is_due(config.eval_every) else False
            stop.exchange(error or run.failure())
            reason = stop_reason(run, stop)
            # The best model is exported from its checkpoint, so it is saved whenever it is measured. None means that
            # the evaluation was interrupted; the resumed run repeats it.
            if reason is not None or is_best or run.is_due(config.save_every):
                run.save(evaluation_due=is_best is None, last=reason is not None)
            if config.export_hf_every and run.step % config.export_hf_every == 0:
                run.export(Path(config.output_dir) / "exports" / folder_name(run.step))
        # A user who stops a run during its last save does not want to wait for the export.
        stop.exchange()
        if stop.is_requested:
            reason = StopReason.SIGNAL
    if reason is not StopReason.SIGNAL:
        run.notify("on_train_end")
    signal = stop.number if reason is StopReason.SIGNAL else None
    return TrainResult(step=run.step, reason=reason, signal=signal, evaluation=run.last_evaluation)


def stop_reason(run: TrainingRun, stop: StopSignal) -> StopReason | None:
    """Return why no further step is to be taken, the same on all ranks; None if there is no reason."""
    if stop.is_requested:
        return StopReason.SIGNAL
    # A callback that asks after the last step changes nothing: the run is complete.
    if run.is_asked_to_stop and run.step < run.total_steps:
        return StopReason.CALLBACK
    if run.early_stopping.stop:
        return StopReason.THRESHOLD if run.early_stopping.reached else StopReason.PATIENCE
    if run.step >= run.total_steps:
        return StopReason.DONE
    # Every process makes at least one step. Otherwise a run whose time is always up would never progress, however often it restarts.
    return StopReason.TIME if stop.is_time_up and run.step > run.resumed_step else None


def evaluate(run: TrainingRun, stop: StopSignal) -> bool | None:
    """Evaluate and log the result. Collective.

    Returns:
        Whether it is the best evaluation so far, False without evaluation data; None if the run was asked to stop before the
        evaluation was complete.
    """
    if not run.has_evaluation:
        return False
    start = time.perf_counter()
    result = run.evaluate(stop)
    if result is None:
        return None
    run.last_evaluation = dict(result.metrics)
    seconds = time.perf_counter() - start
    record = {"step": run.step, "split": "eval", **result.metrics, "tokens": result.tokens, "seconds": seconds}
    # An error of the first rank, which alone logs, must end the others too.
    run.ranks.all_gather_object(None, error=run.log(record, result.completions))
    is_best = run.early_stopping.update(run.step, result.metrics)
    run.notify("on_evaluate", result.metrics)
    return is_best

"""The training loop, which depends on an engine, a method and a loader, but not on a backend."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...engine.errors import DrivetrainError, disk_error
from ...engine.loss import StepResult
from ...engine.parallel.collectives import call_on_first
from ..data.order import Cursor
from .loggers import Logger
from .parts import Evaluation, TrainingRun, notify
from .resume import ResumePoint
from .signals import StopSignal

log = logging.getLogger(__name__)


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
    """The end of training.

    Args:
        step: The last completed step.
        reason: The reason why no further step was taken.
        signal: The signal that this process has received, if any.
    """

    step: int
    reason: StopReason
    signal: int | None = None


def train(run: TrainingRun, start: ResumePoint) -> TrainResult:
    """Train, evaluate, log and save until the run ends. Collective.

    Args:
        run: Everything that training needs.
        start: The point at which to start.
    """
    step, cursor = start.step - 1, start.cursor
    batches = run.loader.batches(cursor)
    with StopSignal(run.config.max_minutes) as stop:
        notify(run, "on_train_begin", step)
        asked = time_is_up = False
        if start.evaluate and run.evaluation is not None:
            metrics = evaluate(run, run.evaluation, step, stop)
            if metrics is None:
                return TrainResult(step=step, reason=StopReason.SIGNAL, signal=stop.number)
            run.early_stopping.update(step, metrics)
            asked = notify(run, "on_evaluate", step, metrics)
            save(run, step, cursor, start)
        while step < run.total_steps and not (run.early_stopping.stop or asked or time_is_up):
            step += 1
            began = time.perf_counter()
            try:
                global_batch, following = next(batches)
            except DrivetrainError:
                # Streamed data that cannot be used end a run, but not what it has learned.
                if step > start.step:
                    save(run, step - 1, cursor, start, last=True)
                    log.error("step %d was saved; once the data are right, the same command resumes from there", step - 1)
                raise
            cursor = following
            batch = run.method.batch(run.engine, global_batch, training=True)
            result = run.engine.train_batch(batch, run.method.loss)
            seconds = time.perf_counter() - began
            record = _record(run, step, cursor, result, seconds)
            error = _log(run.loggers, record)
            asked = notify(run, "on_step_end", step, record)
            best = interrupted = False
            if run.evaluation is not None and _is_due(step, run.config.eval_every, run.total_steps):
                metrics = evaluate(run, run.evaluation, step, stop)
                interrupted = metrics is None
                if metrics is not None:
                    best = run.early_stopping.update(step, metrics)
                    asked |= notify(run, "on_evaluate", step, metrics)
            time_is_up, stopped = stop.time_is_up_or_requested(run.engine.topology, error or run.manager.failure())
            last = stopped or time_is_up or asked or run.early_stopping.stop or step == run.total_steps
            if best or last or _is_due(step, run.config.save_every, run.total_steps):
                save(run, step, cursor, start, evaluate=interrupted, last=last)
            if run.config.export_hf_every and step % run.config.export_hf_every == 0:
                run.export(step)
            if stopped:
                return TrainResult(step=step, reason=StopReason.SIGNAL, signal=stop.number)
    notify(run, "on_train_end", step)
    if step < run.total_steps and asked:
        return TrainResult(step=step, reason=StopReason.CALLBACK)
    if run.early_stopping.stop:
        return TrainResult(step=step, reason=StopReason.THRESHOLD if run.early_stopping.reached else StopReason.PATIENCE)
    return TrainResult(step=step, reason=StopReason.TIME if time_is_up and step < run.total_steps else StopReason.DONE)


def _is_due(step: int, every: int | None, total_steps: int) -> bool:
    return step == total_steps or bool(every and step % every == 0)


def _record(run: TrainingRun, step: int, cursor: Cursor, result: StepResult, seconds: float) -> dict[str, Any]:
    return {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": result.tokens,
        "shared_tokens": result.shared_tokens,
        "sequences": result.sequences,
        # Losses over pairs count pairs instead.
        **({"supervised": result.weights["nll"]} if "nll" in result.weights else {}),
        "micro_batches": result.micro_batches,
        "seconds": seconds,
        "tokens_per_s": result.tokens / seconds,
        "mfu": None if run.peak_flops is None else result.flops / seconds / run.peak_flops,
        "tflops": result.flops / seconds / 1e12,
        "peak_gib": result.peak_gib,
        "epoch": run.loader.epoch(cursor),
        "skipped": result.skipped,
        **result.terms,
        **result.metrics,
    }


def evaluate(run: TrainingRun, evaluation: Evaluation, step: int, stop: StopSignal) -> dict[str, float] | None:
    """Compute the exact loss and metrics over all held-out samples, and the metrics of the generated answers. Collective.

    Each loss term is its weighted sum over all samples divided by the total weight; each metric of the loss is its sum divided by
    the total count. Metrics of answers are means over the answers that are generated.

    Args:
        run: Everything that training needs.
        evaluation: The held-out samples.
        step: The last completed step.
        stop: The stop signal of the run.

    Returns:
        The metrics, or None if the run was asked to stop during the evaluation.
    """
    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    hits: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    tokens, start = 0, time.perf_counter()
    for samples in evaluation.loader.once():
        if stop.stop_requested(run.engine.topology):
            return None
        batch = run.method.batch(run.engine, samples, training=False)
        result = run.engine.forward_backward(batch, run.method.evaluation_loss, forward_only=True)
        tokens += result.tokens
        for term, weight in result.weights.items():
            sums[term] += result.terms[term] * weight
            weights[term] += weight
        for name, count in result.counts.items():
            if count:
                hits[name] += result.metrics[name] * count
                counts[name] += count
    metrics = {"loss": sum(sums[t] / weights[t] for t in weights), **{n: hits[n] / counts[n] for n in counts}}
    answers = evaluation.answers(stop)
    if answers is None:
        return None
    if answers:
        metrics |= call_on_first(lambda: evaluation.metrics.measure(answers), run.engine.topology.host)
    record = {"step": step, "split": "eval", **metrics, "tokens": tokens, "seconds": time.perf_counter() - start}

    def write() -> None:
        for logger in run.loggers:
            logger.log(record)
            if answers:
                logger.answers(step, answers)

    run.engine.topology.all_gather_object(None, error=write_error(step, write))
    return metrics


def _log(loggers: Sequence[Logger], record: Mapping[str, Any]) -> Exception | None:
    """Pass a record to the loggers; return the disk error, if any, which the next exchange raises on all ranks."""

    def write() -> None:
        for logger in loggers:
            logger.log(record)

    return write_error(record["step"], write)


def write_error(step: int, write: Callable[[], object]) -> Exception | None:
    """Write the output of a step; return the disk error, if any."""
    try:
        write()
    except OSError as e:
        return disk_error(f"the metrics of step {step}", e)
    return None


def save(
    run: TrainingRun, step: int, cursor: Cursor, start: ResumePoint, *, evaluate: bool = False, last: bool = False
) -> None:
    """Save a checkpoint with everything that a resumed run needs, keep the best one and delete older ones. Collective.

    Args:
        run: Everything that training needs.
        step: The last completed step.
        cursor: The position of the next batch.
        start: The point at which the run started, with the metadata that every checkpoint records.
        evaluate: Whether the evaluation of this step still has to be done.
        last: Whether this is the last step of the run.
    """
    keep = () if run.early_stopping.best_step is None else (run.early_stopping.best_step,)
    extra = {
        **start.run_metadata,
        "data": run.loader.state(cursor),
        "watch": run.early_stopping.state(),
        "evaluate": evaluate,
    }
    run.manager.save(step, extra, keep=keep, last=last)
    notify(run, "on_save", step)

"""The training loop. It knows an engine, a loss and a loader, and no backend."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...engine.base import BaseEngine
from ...engine.checkpoint.manager import CheckpointManager
from ...engine.errors import disk_error
from ..config.sections import TrainerConfig
from ..data.loader import Cursor, Loader
from ..methods.base import Method
from .early_stopping import Watch
from .loggers import Logger
from .resume import Start
from .signals import StopSignal


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What happens every `trainer.eval_every` steps.

    Args:
        loader: of held-out samples.
        tell: what else is shown then, given the step and the run's signal: sample answers. Collective.
    """

    loader: Loader
    tell: Callable[[int, StopSignal], None]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How training ended.

    Args:
        step: the last one made.
        why: `done`, `patience` (nothing better for so many evaluations) or `signal` (SIGTERM or Ctrl-C).
    """

    step: int
    why: str


def train(
    engine: BaseEngine,
    method: Method,
    loader: Loader,
    evaluation: Evaluation | None,
    manager: CheckpointManager,
    config: TrainerConfig,
    loggers: Sequence[Logger],
    watch: Watch,
    *,
    export: Callable[[int], object],
    start: Start,
    total: int,
    peak: float | None,
) -> Ended:
    """Step, evaluate, log, save.

    Args:
        engine: initialised, or resumed.
        method: what to minimise, and what a batch needs for it.
        loader: of training samples.
        evaluation: of held-out samples.
        manager: of the run's checkpoints.
        config: how often what happens.
        loggers: on the first rank; empty elsewhere.
        watch: over evaluations.
        export: writes the model as it is, given the step. Collective.
        start: where to begin.
        total: number of the last step.
        peak: FLOP/s of all devices together, or None where it is not known.
    """
    batches = loader.batches(start.cursor)
    why = "patience" if watch.stop else "done"
    step = start.step - 1
    with StopSignal() as stop:
        if start.evaluate and evaluation is not None:
            measured = evaluate(engine, method, evaluation, loggers, step, stop)
            if measured is None:
                return Ended(step=step, why="signal")
            watch.see(step, measured)
            why = "patience" if watch.stop else "done"
            save(manager, step, loader, start.cursor, watch, start.told)
        while step < total and why == "done":
            began = time.perf_counter()
            drawn, cursor = next(batches)
            result = engine.train_batch(method.batch(engine, drawn, training=True), method.loss)
            seconds = time.perf_counter() - began
            step += 1
            record = {
                "step": step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "tokens": result.tokens,
                "sequences": result.sequences,
                "micro_batches": result.micro_batches,
                "seconds": seconds,
                "tokens_per_s": result.tokens / seconds,
                "mfu": None if peak is None else result.flops / seconds / peak,
                "tflops": result.flops / seconds / 1e12,
                "peak_gib": result.peak_gib,
                "epoch": cursor.epoch + cursor.position / len(loader),
                "skipped": result.skipped,
                **result.terms,
                **result.metrics,
            }
            error = report(loggers, record)
            best = due = False
            if evaluation is not None and (step == total or (config.eval_every and step % config.eval_every == 0)):
                measured = evaluate(engine, method, evaluation, loggers, step, stop)
                due = measured is None
                best = measured is not None and watch.see(step, measured)
            why = "signal" if stop.asked(engine.topology, error or manager.failure()) else "patience" if watch.stop else "done"
            if best or why != "done" or step == total or (config.save_every and step % config.save_every == 0):
                last = why != "done" or step == total
                save(manager, step, loader, cursor, watch, start.told, evaluate=due, last=last)
            if config.export_hf_every and step % config.export_hf_every == 0:
                export(step)
    return Ended(step=step, why=why)


def evaluate(
    engine: BaseEngine, method: Method, evaluation: Evaluation, loggers: Sequence[Logger], step: int, stop: StopSignal
) -> dict[str, float] | None:
    """Exact loss and metrics over all held-out samples: each sum over its weight or its count, of them all.

    Returns:
        what was measured; None where the run is asked to stop meanwhile.
    """
    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    hits: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    tokens, began = 0, time.perf_counter()
    for drawn in evaluation.loader.once():
        if stop.asked(engine.topology):
            return None
        result = engine.forward_backward(
            method.batch(engine, drawn, training=False), method.evaluation_loss, forward_only=True
        )
        tokens += result.tokens
        for term, weight in result.weights.items():
            sums[term] += result.terms[term] * weight
            weights[term] += weight
        for name, count in result.counts.items():
            if count:
                hits[name] += result.metrics[name] * count
                counts[name] += count
    measured = {"loss": sum(sums[t] / weights[t] for t in weights), **{n: hits[n] / counts[n] for n in counts}}
    seconds = time.perf_counter() - began
    engine.topology.agree(report(loggers, {"step": step, "split": "eval", **measured, "tokens": tokens, "seconds": seconds}))
    evaluation.tell(step, stop)
    return measured


def report(loggers: Sequence[Logger], record: Mapping[str, Any]) -> Exception | None:
    """Hand a record to the loggers; what kept one from writing it, for all ranks to hear of."""

    def write() -> None:
        for logger in loggers:
            logger.log(record)

    return written(record["step"], write)


def written(step: int, write: Callable[[], object]) -> Exception | None:
    """Write what belongs to a step; what kept it from being written."""
    try:
        write()
    except OSError as e:
        return disk_error(f"the metrics of step {step}", e)
    return None


def save(
    manager: CheckpointManager,
    step: int,
    loader: Loader,
    cursor: Cursor,
    watch: Watch,
    told: Mapping[str, Any],
    *,
    evaluate: bool = False,
    last: bool = False,
) -> None:
    """A checkpoint of everything a resumed run needs; older ones are rotated out, the best one is kept.

    Args:
        manager: of the run's checkpoints.
        step: its number.
        loader: of the training data.
        cursor: of the next batch.
        watch: over evaluations.
        told: what each of the run's checkpoints says of it.
        evaluate: the evaluation of this step is still to be made.
        last: no step follows.
    """
    keep = () if watch.best_step is None else (watch.best_step,)
    extra = {**told, "data": loader.state(cursor), "watch": watch.state(), "evaluate": evaluate}
    manager.save(step, extra, keep=keep, last=last)

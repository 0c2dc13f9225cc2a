"""The training loop. It knows an engine, a loss and a loader, and no backend."""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ..engine.base import BaseEngine
from ..engine.checkpoint.folder import rotate
from ..engine.objective import Loss
from .data.loader import Cursor, Loader
from .metrics import Logger
from .options import TrainerConfig


def train(
    engine: BaseEngine,
    loss: Loss,
    loader: Loader,
    evaluation: Loader | None,
    config: TrainerConfig,
    loggers: Sequence[Logger],
    *,
    steps: range,
    cursor: Cursor,
) -> None:
    """Step, evaluate, log, save.

    Args:
        engine: initialised, or resumed.
        loss: what to minimise.
        loader: of training samples.
        evaluation: of held-out samples.
        config: how often what happens.
        loggers: on the first rank; empty elsewhere.
        steps: numbers of the steps to make, from 1.
        cursor: of the first batch.
    """
    batches = loader.batches(cursor)
    for step in steps:
        batch, cursor = next(batches)
        start = time.perf_counter()
        result = engine.train_batch(batch, loss)
        seconds = time.perf_counter() - start
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
            "epoch": cursor.epoch + cursor.position / len(loader),
            "skipped": result.skipped,
            **result.terms,
            **result.metrics,
        }
        for logger in loggers:
            logger.log(record)
        last = step == steps[-1]
        if evaluation is not None and (last or (config.eval_every and step % config.eval_every == 0)):
            evaluate(engine, loss, evaluation, loggers, step)
        if last or (config.save_every and step % config.save_every == 0):
            save(engine, config, step, cursor)


def evaluate(engine: BaseEngine, loss: Loss, loader: Loader, loggers: Sequence[Logger], step: int) -> float:
    """Exact loss over all held-out samples: each term's sum over its weight, of them all."""
    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    tokens = 0
    for batch in loader.once():
        result = engine.forward_backward(batch, loss, forward_only=True)
        tokens += result.tokens
        for term, weight in result.weights.items():
            sums[term] += result.terms[term] * weight
            weights[term] += weight
    mean = sum(sums[term] / weights[term] for term in weights)
    for logger in loggers:
        logger.log({"step": step, "split": "eval", "loss": mean, "tokens": tokens})
    return mean


def save(engine: BaseEngine, config: TrainerConfig, step: int, cursor: Cursor) -> None:
    """A checkpoint of everything a resumed run needs; older ones are rotated out."""
    root = Path(config.output_dir) / "checkpoints"
    engine.save_checkpoint(root, step, {"cursor": cursor.to_json()})
    if engine.topology.is_main:
        rotate(root, config.keep_last)
    engine.topology.barrier()

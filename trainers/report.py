"""Log messages of a run before its first step and after its last one."""

import logging
from collections.abc import Sequence
from dataclasses import asdict

from ..engine.base import BaseEngine
from .config.parse import changes
from .config.runs import RunConfig
from .data.dataset import TokenDataset
from .data.encode import mark_supervised
from .data.load import RunData
from .data.loader import Loader
from .data.stream import StreamLoader
from .loop.loop import StopReason, TrainResult
from .loop.parts import TrainingRun
from .loop.resume import ResumePoint

log = logging.getLogger(__name__)


def announce(
    engine: BaseEngine,
    config: RunConfig,
    data: RunData,
    loader: Loader | StreamLoader,
    total_steps: int,
    *,
    written: bool,
) -> None:
    """Log the settings, the layout, the model, the sources and the first sample. Collective.

    Args:
        engine: The initialized engine.
        config: The run's settings.
        data: The run's data.
        loader: The batches to train on.
        total_steps: The number of steps in the run.
        written: Whether the run writes its settings.
    """
    log.info("settings%s", f" (complete list: {config.trainer.output_dir}/config.yaml)" if written else "")
    for name, value in changes(config).items():
        log.info("  %s=%s", name, value)
    if isinstance(loader, Loader):
        samples = loader.samples
        _announce_layout(engine, f"{len(samples)} samples", total_steps)
        _announce_sources(config, samples, loader.epoch_sizes)
    else:
        samples = loader.first()
        _announce_layout(engine, f"streaming {len(config.data.train)} sources", total_steps)
        log.info("  the first %d rows: %d samples, %d tokens", config.data.stream_rows, len(samples), sum(samples.tokens))
    positions = engine.model_shape.positions
    if positions is not None:
        longer_count = int((samples.lengths > positions).any(1).sum())
        engine.warn_about_positions(int(samples.lengths.max()), f"the longest sample (one of {longer_count})")
    marked_documents = "\n  ".join(mark_supervised(data.tokenizer, document) for document in samples[0])
    log.info("first sample, with the supervised parts between « and »:\n  %s", marked_documents)


def _announce_layout(engine: BaseEngine, data: str, total_steps: int) -> None:
    parallel, size = engine.topology.parallel, engine.topology.size
    layout = " ".join(
        f"{axis}={n}".lower() for axis, n in asdict(parallel).items() if axis == "dp_shard" or n is True or n > 1
    )
    processes = "process" if size == 1 else "processes"
    device = engine.topology.device.type
    log.info("%s, %d steps; %d %s on %s, %s", data, total_steps, size, processes, device, layout)
    shape = engine.model_shape
    log.info("%d parameters, %d of them trainable", shape.parameters, shape.parameters_trained)
    for line in engine.describe_settings():
        log.info("%s", line)


def _announce_sources(config: RunConfig, dataset: TokenDataset, epoch_sizes: Sequence[int]) -> None:
    columns = (config.data.train, dataset.sizes, epoch_sizes, dataset.tokens, dataset.split_chats)
    for name, size, samples_per_epoch, tokens, split_chats_count in zip(*columns, strict=True):
        per_epoch = (
            "" if samples_per_epoch == size else f"; {samples_per_epoch} per epoch ({samples_per_epoch / size:.2f} times)"
        )
        per_turn = (
            f"; {split_chats_count} chats, with each answer as a separate sample (data.turns={config.data.turns})"
            if split_chats_count
            else ""
        )
        log.info("  %s: %d samples, %d tokens%s%s", name, size, tokens, per_epoch, per_turn)


def report_end(result: TrainResult, start: ResumePoint, run: TrainingRun) -> None:
    """Log why training ended, unless it has just completed all of its steps.

    Args:
        result: The end of training.
        start: The point at which training started.
        run: Everything that training needs.
    """
    if result.reason is StopReason.SIGNAL:
        log.info("stopped by a signal after step %d, which was saved; the same command resumes from there", result.step)
    elif result.reason in (StopReason.CALLBACK, StopReason.TIME):
        log.info("stopped after step %d of %d: %s", result.step, run.total_steps, result.reason.value)
    elif result.reason is StopReason.PATIENCE:
        log.info(
            "stopped after step %d: %d evaluations without an improvement in %s",
            result.step,
            run.config.patience,
            run.early_stopping.metric,
        )
    elif result.reason is StopReason.THRESHOLD:
        log.info(run.early_stopping.describe_reached(result.step))
    elif result.step < start.step:
        log.info("step %d of %d is already done; nothing to train", result.step, run.total_steps)

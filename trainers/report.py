"""What a run says of itself before its first step and after its last one."""

import logging
from dataclasses import asdict

from ..engine.base import BaseEngine
from .config.parse import changes
from .config.runs import RunConfig
from .data.encode import marked
from .data.load import RunData
from .data.loader import Sampler
from .loop.loop import Run, StopReason, TrainResult
from .loop.resume import ResumePoint

log = logging.getLogger(__name__)


def announce(engine: BaseEngine, config: RunConfig, data: RunData, sampler: Sampler, total_steps: int) -> None:
    """Log the settings, the layout, the model, the sources and the first sample.

    Args:
        engine: The engine, initialized.
        config: The run's settings.
        data: The run's data.
        sampler: The order of the training samples.
        total_steps: The number of the last step.
    """
    log.info("settings (all of them: %s/config.yaml)", config.trainer.output_dir)
    for name, value in changes(config).items():
        log.info("  %s=%s", name, value)
    _announce_layout(engine, len(data.train), total_steps)
    _announce_sources(config, data, sampler)
    positions = engine.model_shape.positions
    if positions is not None:
        longer = int((data.train.lengths > positions).any(1).sum())
        engine.warn_of_positions(int(data.train.lengths.max()), f"the longest sample (of {longer} such)")
    shown = "\n  ".join(marked(data.tokenizer, document) for document in data.train[0])
    log.info("first sample, what is learned of it between « and »:\n  %s", shown)


def _announce_layout(engine: BaseEngine, samples: int, total_steps: int) -> None:
    parallel, size = engine.topology.parallel, engine.topology.size
    layout = " ".join(
        f"{axis}={n}".lower() for axis, n in asdict(parallel).items() if axis == "dp_shard" or n is True or n > 1
    )
    processes = "process" if size == 1 else "processes"
    device = engine.topology.device.type
    log.info("%d samples, %d steps; %d %s on %s, %s", samples, total_steps, size, processes, device, layout)
    shape = engine.model_shape
    log.info("%d parameters, %d of them trained", shape.parameters, shape.parameters_trained)


def _announce_sources(config: RunConfig, data: RunData, sampler: Sampler) -> None:
    dataset = data.train
    columns = (config.data.train, dataset.sizes, sampler.drawn, dataset.tokens, dataset.split_chats)
    for name, size, drawn, tokens, split in zip(*columns, strict=True):
        times = "" if drawn == size else f"; {drawn} an epoch ({drawn / size:.2f} times)"
        per_turn = f"; {split} chats, each answer a sample of its own (data.turns={config.data.turns})" if split else ""
        log.info("  %s: %d samples, %d tokens%s%s", name, size, tokens, times, per_turn)


def report_end(result: TrainResult, start: ResumePoint, run: Run) -> None:
    """Log why training ended, unless all of its steps were made just now.

    Args:
        result: How it ended.
        start: Where it started.
        run: All that took part.
    """
    if result.reason is StopReason.SIGNAL:
        log.info("stopped by a signal after step %d, which is saved; the same command resumes from there", result.step)
    elif result.reason is StopReason.PATIENCE:
        log.info(
            "stopped after step %d: %d evaluations without a better %s",
            result.step,
            run.config.patience,
            run.early_stopping.metric,
        )
    elif result.step < start.step:
        log.info("step %d of %d is done already; nothing to train", result.step, run.total_steps)

"""Log messages of a run before its first step."""

import logging
from collections.abc import Sequence
from dataclasses import asdict

from ...engine.base import BaseEngine
from ..config.runs import RunConfig
from ..data.dataset import TokenDataset
from ..data.encode import mark_supervised
from ..data.load import RunData
from ..data.loader import Loader
from ..data.stream import StreamLoader
from ..data.unknown_tokens import warn_about_unknown_tokens
from ..loop.formats import counted
from ..loop.run_folder import announce_settings

log = logging.getLogger(__name__)


def announce(
    engine: BaseEngine,
    config: RunConfig,
    data: RunData,
    loader: Loader | StreamLoader,
    total_steps: int,
) -> None:
    """Log the settings, the layout, the model, the sources and the first sample. Collective.

    Args:
        engine: The initialized engine.
        config: The run's settings.
        data: The run's data.
        loader: The batches to train on.
        total_steps: The number of steps in the run.
    """
    announce_settings(config)
    if isinstance(loader, Loader):
        samples = loader.samples
        _announce_layout(engine, counted(len(samples), "sample"), total_steps)
        _announce_sources(config, samples, loader.epoch_sizes)
    else:
        samples = loader.first()
        _announce_layout(engine, f"streaming {counted(len(config.data.train), 'source')}", total_steps)
        log.info("  the first %d rows: %d samples, %d tokens", config.data.stream_rows, len(samples), sum(samples.tokens))
    warn_about_unknown_tokens(samples, data.tokenizer, "data.train")
    if data.held_out is not None:
        warn_about_unknown_tokens(data.held_out, data.tokenizer, "data.eval")
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
    log.info("%s, %s; %d %s on %s, %s", data, counted(total_steps, "step"), size, processes, device, layout)
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
            f"; {split_chats_count} chats, with each assistant turn as a separate sample (data.turns={config.data.turns})"
            if split_chats_count
            else ""
        )
        log.info("  %s: %d samples, %d tokens%s%s", name, size, tokens, per_epoch, per_turn)

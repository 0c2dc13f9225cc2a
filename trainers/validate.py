"""What comes before a model is built: settings that no run could be made of, the run's folder, the data."""

import fcntl
import logging
import math
import os
import socket
from pathlib import Path
from typing import Any, TextIO

from ..engine.checkpoint.storage import open_store
from ..engine.errors import CheckpointError, ConfigError, DrivetrainError
from ..engine.hf.tokenizer import load_tokenizer
from ..engine.lr_schedule import check_optim
from ..engine.parallel.collectives import collective_errors
from .config.sections import RunConfig
from .data.chat import RESERVED
from .data.dataset import Budget, Samples
from .data.tokenize import load_stores
from .hub import check_push
from .loop.early_stopping import Watch
from .loop.loggers import check_loggers
from .methods.base import Method

log = logging.getLogger(__name__)


def check_run(config: RunConfig, method: Method) -> None:
    """Refuse what no run could be made of.

    Args:
        config: of the run.
        method: of training.

    Raises:
        ConfigError: names the setting.
    """
    trainer, data = config.trainer, config.data
    if not data.train:
        raise ConfigError("data.train is not set; give files, folders or Hub names, as in data.train=[train.jsonl]")
    for name, value, least in (
        ("data.batch_size", data.batch_size, 1),
        ("data.max_length", data.max_length, 1),
        ("data.workers", data.workers, 0),
        ("engine.micro_batch.max_tokens", config.engine.micro_batch.max_tokens, 1),
        ("trainer.epochs", trainer.epochs, 1),
        ("trainer.max_steps", trainer.max_steps, 1),
        ("trainer.eval_every", trainer.eval_every, 1),
        ("trainer.save_every", trainer.save_every, 1),
        ("trainer.keep_last", trainer.keep_last, 1),
        ("trainer.keep_every", trainer.keep_every, 1),
        ("trainer.export_hf_every", trainer.export_hf_every, 1),
        ("trainer.patience", trainer.patience, 1),
        ("trainer.generate", trainer.generate, 0),
        ("trainer.generate_tokens", trainer.generate_tokens, 1),
        ("trainer.log_every", trainer.log_every, 1),
        ("data.seed", data.seed, 0),
        ("engine.seed", config.engine.seed, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}; it must be at least {least}")
    if data.weights is not None:
        if len(data.weights) != len(data.train):
            raise ConfigError(
                f"data.weights has {len(data.weights)} numbers, data.train {len(data.train)} sources; give one for each"
            )
        if not all(0 < w < float("inf") for w in data.weights):
            raise ConfigError(
                f"data.weights={list(data.weights)}; a weight is more than 0: leave a source out of data.train instead"
            )
    for name, asked in (
        ("trainer.best_metric", trainer.best_metric),
        ("trainer.generate", trainer.generate),
        ("trainer.eval_every", trainer.eval_every),
    ):
        if asked and not data.eval:
            raise ConfigError(f"{name}={asked} needs data.eval, which is not set")
    if trainer.patience is not None and trainer.eval_every is None:
        raise ConfigError(
            f"trainer.patience={trainer.patience} counts evaluations, and there is one at the end only; set trainer.eval_every"
        )
    for name, where in (("trainer.checkpoint_dir", trainer.checkpoint_dir), ("trainer.resume", trainer.resume)):
        if where and "://" in where:
            try:
                open_store(where)
            except CheckpointError as e:
                raise ConfigError(f"{name}: {e}") from e
    if trainer.resume not in ("auto", "none") and "://" not in trainer.resume and not Path(trainer.resume).is_dir():
        raise ConfigError(f"trainer.resume={trainer.resume} is no folder; give auto, none or a checkpoint folder")
    if trainer.push_to_hub is not None:
        if not trainer.export_hf:
            raise ConfigError(
                f"trainer.push_to_hub={trainer.push_to_hub} uploads the final export; set trainer.export_hf=true"
            )
        check_push(trainer.push_to_hub)
    if not trainer.timeout_minutes > 0:
        raise ConfigError(f"trainer.timeout_minutes={trainer.timeout_minutes}; it must be more than 0")
    if taken := sorted({*data.chat_template_kwargs} & {*RESERVED}):
        raise ConfigError(
            f"data.chat_template_kwargs has {', '.join(taken)}, which is no variable of a template; leave it out"
        )
    sample_budget(config, method)
    check_optim(config.optim, trainer.max_steps or 1)
    if trainer.peak_tflops is not None and not trainer.peak_tflops > 0:
        raise ConfigError(f"trainer.peak_tflops={trainer.peak_tflops}; it must be more than 0")
    Watch(trainer.best_metric, trainer.patience, "", method.lower_is_better)
    method.check()
    check_loggers(trainer.loggers)


def load_data(config: RunConfig, method: Method) -> tuple[Any, Samples, Samples | None]:
    """The tokenizer, training and held-out samples; an error of one rank is everybody's, before any weight is read."""
    budget = sample_budget(config, method)
    with collective_errors():
        tokenizer = load_tokenizer(config.model)
    found: list[Samples] = []
    for names, training in ((config.data.train, True), (config.data.eval, False)):
        if not names:
            continue
        stores = load_stores(names, tokenizer, config.data, training=training, kind=method.kind)
        with collective_errors():
            found.append(Samples(stores, config.data, budget, names))
    return tokenizer, found[0], found[1] if config.data.eval else None


def sample_budget(config: RunConfig, method: Method) -> Budget:
    """What every sample must fit: training and inference micro-batches, cut evenly over context-parallel ranks."""
    sizes, multiple = config.engine.micro_batch, math.lcm(config.engine.parallel.token_multiple, method.token_multiple)
    least, name = sizes.max_tokens, "engine.micro_batch.max_tokens"
    if (config.data.eval or method.infers) and sizes.infer_max_tokens is not None and sizes.infer_max_tokens < least:
        least, name = sizes.infer_max_tokens, "engine.micro_batch.infer_max_tokens"
    usable = least // multiple * multiple
    longest = config.data.max_length
    if longest is not None and longest > usable:
        raise ConfigError(
            f"data.max_length={longest} is more than {name}={least}: such a sample would fit no micro-batch; raise the budget or lower the length"
        )
    rounded = "" if usable == least else f" ({usable}, since {multiple} ranks share it evenly)"
    return Budget(tokens=usable, setting=f"{name}={least}{rounded}")


def make_folder(folder: Path, setting: str = "trainer.output_dir") -> None:
    """A folder of the run, by the setting that names it.

    Raises:
        ConfigError: it cannot be made or written.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{setting}={folder} is a file; choose a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{setting}={folder} cannot be made: {e.strerror or e}") from e
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{setting}={folder} cannot be written by this user; choose another folder")


def lock_folder(folder: Path, setting: str = "trainer.output_dir") -> TextIO:
    """Take a run's folder for this process alone; closing the file, or dying, gives it back.

    Raises:
        ConfigError: another run has it, or it cannot be written.
    """
    try:
        file = open(folder / ".lock", "a+")
    except OSError as e:
        raise ConfigError(f"{setting}={folder} cannot be written: {e.strerror or e}") from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise ConfigError(
            f"{setting}={folder} is in use by another run ({owner or 'just started'}); wait for it, stop it, or choose another folder"
        ) from e
    except OSError as e:
        # Some network file systems have no locks.
        log.warning("%s cannot be locked (%s): a second run in it would not be noticed", folder, e.strerror or e)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file

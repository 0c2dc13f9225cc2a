"""From a config to a finished SFT run: engine, data, resume, loop, export."""

import datetime
import logging
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import AutoTokenizer

from ..engine.base import BaseEngine
from ..engine.checkpoint.folder import latest, sweep
from ..engine.errors import CheckpointError, ConfigError, DrivetrainError, ModelError
from ..engine.export import export_hf
from ..engine.model_path import check_model_path
from ..engine.registry import engine_class
from ..engine.topology import agree, init_distributed
from ..workers.losses.sft import SFTLoss
from .data.loader import Cursor, Loader
from .data.sample import Sample
from .data.sources import load_samples
from .loop import train
from .metrics import check_loggers, make_loggers, plot_loss
from .options import SFTConfig, TrainerConfig, to_yaml

log = logging.getLogger(__name__)


def run_sft(config: SFTConfig) -> None:
    """Train. Collective over all processes of the job.

    Raises:
        DrivetrainError: with the setting, the file or the row that is wrong; on every rank.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("drivetrain").setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    check_run(config)
    init_distributed(datetime.timedelta(minutes=config.trainer.timeout_minutes))
    try:
        _run(config)
    finally:
        dist.destroy_process_group()


def check_run(config: SFTConfig) -> None:
    """Refuse what no run could be made of.

    Raises:
        ConfigError: names the setting.
    """
    trainer, data = config.trainer, config.data
    if not data.train:
        raise ConfigError("data.train is not set; give a list of jsonl or parquet files, as in data.train=[train.jsonl]")
    for name, value in (
        ("data.batch_size", data.batch_size),
        ("data.max_length", data.max_length),
        ("engine.micro_batch.max_tokens", config.engine.micro_batch.max_tokens),
        ("trainer.epochs", trainer.epochs),
        ("trainer.max_steps", trainer.max_steps),
        ("trainer.eval_every", trainer.eval_every),
        ("trainer.save_every", trainer.save_every),
        ("trainer.keep_last", trainer.keep_last),
        ("trainer.log_every", trainer.log_every),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}; it must be at least 1")
    if config.model.head != "lm":
        raise ConfigError(f"model.head={config.model.head}: SFT trains a language-model head; set model.head=lm")
    check_loggers(trainer.loggers)
    try:
        Path(trainer.output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"trainer.output_dir={trainer.output_dir} cannot be made: {e}") from e


def _run(config: SFTConfig) -> None:
    output = Path(config.trainer.output_dir)
    samples, held_out = load_data(config)
    per_epoch = -(-len(samples) // config.data.batch_size)
    steps = config.trainer.max_steps or config.trainer.epochs * per_epoch
    engine = engine_class(config.engine.backend)(
        model=config.model, engine=config.engine, optim=config.optim, total_steps=steps
    ).initialize()
    try:
        _prepare(engine, config, output)
        first, cursor = resume(engine, config.trainer, output, config.data.seed)
        loaders = [
            Loader(
                part,
                batch_size=config.data.batch_size,
                seed=config.data.seed,
                shuffle=config.data.shuffle,
                dp_rank=engine.topology.dp_rank,
                dp_size=engine.topology.dp_size,
                ratio=engine.attention_ratio,
            )
            for part in (samples, held_out)
            if part is not None
        ]
        main = engine.topology.is_main
        loggers = make_loggers(config.trainer.loggers, output, steps, config.trainer.log_every, first - 1) if main else []
        todo = range(first, steps + 1)
        if todo:
            train(
                engine,
                SFTLoss(),
                loaders[0],
                loaders[1] if len(loaders) > 1 else None,
                config.trainer,
                loggers,
                steps=todo,
                cursor=cursor,
            )
        else:
            log.info("step %d of %d is done already; nothing to train", first - 1, steps)
        for logger in loggers:
            logger.close()
        if main and (output / "metrics.jsonl").is_file():
            plot_loss(output / "metrics.jsonl", output / "loss.png", str(output))
        if config.trainer.export_hf:
            adapted = config.model.lora.rank > 0
            if adapted:
                export_hf(engine, output / "adapter", adapters="only")
            folder = export_hf(engine, output / "hf")
            log.info("model in Hugging Face format: %s%s", folder, f"; adapter alone: {output / 'adapter'}" if adapted else "")
    finally:
        engine.close()


def load_data(config: SFTConfig) -> tuple[list[Sample], list[Sample] | None]:
    """Training and held-out samples; an error of one rank is everybody's, before any weight is read."""
    budget, error = config.engine.micro_batch.max_tokens, None
    samples: list[Sample] = []
    held_out: list[Sample] | None = None
    try:
        tokenizer = load_tokenizer(config)
        samples = load_samples(config.data.train, tokenizer, config.data, budget)
        held_out = load_samples(config.data.eval, tokenizer, config.data, budget) if config.data.eval else None
    except DrivetrainError as e:
        error = e
    agree(error)
    return samples, held_out


def load_tokenizer(config: SFTConfig) -> Any:
    """The model's tokenizer.

    Raises:
        ModelError: there is none.
    """
    path = config.model.path
    check_model_path(path)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError, KeyError) as e:
        raise ModelError(f"model.path={path} has no usable tokenizer: {e}") from e


def _prepare(engine: BaseEngine, config: SFTConfig, output: Path) -> None:
    """The run's folder and its config; an error of the first rank is everybody's."""
    error: Exception | None = None
    if engine.topology.is_main:
        try:
            (output / "config.yaml").write_text(to_yaml(config))
            sweep(output / "checkpoints")
            log.info("%s", to_yaml(config))
        except OSError as e:
            error = ConfigError(f"trainer.output_dir={output} cannot be written: {e}")
    engine.topology.agree(error)


def resume(engine: BaseEngine, config: TrainerConfig, output: Path, seed: int) -> tuple[int, Cursor]:
    """Load the checkpoint that `trainer.resume` names, if any.

    Returns:
        the number of the first step to make, and the cursor of its batch.

    Raises:
        CheckpointError: the named checkpoint cannot be used, or its sample order has another seed.
    """
    start = Cursor(seed=seed)
    if config.resume == "none":
        return 1, start
    if config.resume == "auto":
        found: Path | None = None
        if engine.topology.is_main:
            manifest, skipped = latest(output / "checkpoints")
            found = None if manifest is None else manifest.folder
            for reason in skipped:
                log.warning("not resumed from: %s", reason)
        # The first rank decides: another might see the folder of a shared file system a moment later.
        folder = engine.topology.exchange(found)[0]
        if folder is None:
            return 1, start
    else:
        folder = Path(config.resume)
    restored = engine.load_checkpoint(folder)
    cursor = Cursor.from_json(restored.extra["cursor"])
    if cursor.seed != seed:
        raise CheckpointError(
            f"{folder} was saved with data.seed={cursor.seed}, not {seed}; use that seed, or trainer.resume=none"
        )
    log.info("resumed from %s%s", folder, "" if restored.same_layout else " (another layout: random state drawn anew)")
    return restored.step + 1, cursor

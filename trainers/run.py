"""From a config to a finished SFT run: engine, data, resume, loop, export."""

import datetime
import logging
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import AutoTokenizer

from ..engine.base import BaseEngine
from ..engine.checkpoint.folder import folder_name, latest, steps, sweep
from ..engine.errors import CheckpointError, ConfigError, DrivetrainError, ModelError
from ..engine.export import export_hf
from ..engine.model_path import check_model_path
from ..engine.registry import engine_class
from ..engine.topology import agree, init_distributed
from ..workers.losses.sft import SFTLoss
from .data.loader import Cursor, Loader
from .data.sample import Sample
from .data.sources import Budget, load_samples
from .loop import train
from .metrics import Logger, check_loggers, make_loggers, plot_loss
from .options import SFTConfig, TrainerConfig, changes, differences, to_yaml

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


def _run(config: SFTConfig) -> None:
    output = Path(config.trainer.output_dir)
    samples, held_out = load_data(config)
    per_epoch = -(-len(samples) // config.data.batch_size)
    total = config.trainer.max_steps or config.trainer.epochs * per_epoch
    engine = engine_class(config.engine.backend)(
        model=config.model, engine=config.engine, optim=config.optim, total_steps=total
    ).initialize()
    try:
        if engine.topology.is_main:
            sweep(output / "checkpoints")
        _announce(engine, config, len(samples), total)
        first, cursor = resume(engine, config.trainer, output, Cursor(seed=config.data.seed, samples=len(samples)))
        _write_config(engine, config, output, resumed=first > 1)
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
        loggers = _loggers(engine, config, output, total, first - 1)
        todo = range(first, total + 1)
        if todo:
            evaluation = loaders[1] if held_out is not None else None
            train(engine, SFTLoss(), loaders[0], evaluation, config.trainer, loggers, steps=todo, cursor=cursor)
        else:
            log.info("step %d of %d is done already; nothing to train", first - 1, total)
        for logger in loggers:
            logger.close()
        if config.trainer.export_hf:
            _export(engine, config, output)
        if engine.topology.is_main and (output / "metrics.jsonl").is_file():
            plot_loss(output / "metrics.jsonl", output / "loss.png", str(output))
    finally:
        engine.close()


def _loggers(engine: BaseEngine, config: SFTConfig, output: Path, total: int, resumed: int) -> list[Logger]:
    """Loggers on the first rank; an error there is everybody's."""
    loggers: list[Logger] = []
    error: Exception | None = None
    if engine.topology.is_main:
        try:
            loggers = make_loggers(config.trainer.loggers, output, total, config.trainer.log_every, resumed)
        except Exception as e:  # raised on all ranks by agree
            error = e
    engine.topology.agree(error)
    return loggers


def _export(engine: BaseEngine, config: SFTConfig, output: Path) -> None:
    adapted = config.model.lora.rank > 0
    if adapted:
        export_hf(engine, output / "adapter", adapters="only")
    folder = export_hf(engine, output / "hf")
    log.info("model in Hugging Face format: %s%s", folder, f"; adapter alone: {output / 'adapter'}" if adapted else "")


def load_data(config: SFTConfig) -> tuple[list[Sample], list[Sample] | None]:
    """Training and held-out samples; an error of one rank is everybody's, before any weight is read."""
    error: Exception | None = None
    samples: list[Sample] = []
    held_out: list[Sample] | None = None
    try:
        make_folder(Path(config.trainer.output_dir))
        tokenizer, budget = load_tokenizer(config), sample_budget(config)
        samples = load_samples(config.data.train, tokenizer, config.data, budget)
        held_out = load_samples(config.data.eval, tokenizer, config.data, budget) if config.data.eval else None
    except DrivetrainError as e:
        error = e
    agree(error)
    return samples, held_out


def sample_budget(config: SFTConfig) -> Budget:
    """What every sample must fit: training and evaluation micro-batches, cut evenly over context-parallel ranks."""
    sizes, cp = config.engine.micro_batch, max(1, config.engine.parallel.cp)
    least, name = sizes.max_tokens, "engine.micro_batch.max_tokens"
    if config.data.eval and sizes.infer_max_tokens is not None and sizes.infer_max_tokens < least:
        least, name = sizes.infer_max_tokens, "engine.micro_batch.infer_max_tokens"
    usable = least // cp * cp
    rounded = "" if usable == least else f" ({usable}, since engine.parallel.cp={cp} ranks share it evenly)"
    return Budget(tokens=usable, setting=f"{name}={least}{rounded}")


def make_folder(folder: Path) -> None:
    """The run's folder.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"trainer.output_dir={folder} cannot be made: {e}") from e
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"trainer.output_dir={folder} cannot be written by this user; choose another folder")


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


def _write_config(engine: BaseEngine, config: SFTConfig, output: Path, *, resumed: bool) -> None:
    """`config.yaml`, after saying what an earlier run of this folder had otherwise; an error is everybody's."""
    error: Exception | None = None
    if engine.topology.is_main:
        try:
            file = output / "config.yaml"
            if resumed and file.is_file():
                for line in differences(file, config):
                    log.warning("resumed with another setting: %s", line)
            file.write_text(to_yaml(config))
        except OSError as e:
            error = ConfigError(f"trainer.output_dir={output} cannot be written: {e}")
    engine.topology.agree(error)


def _announce(engine: BaseEngine, config: SFTConfig, samples: int, total: int) -> None:
    log.info("settings (all of them: %s/config.yaml)", config.trainer.output_dir)
    for name, value in changes(config).items():
        log.info("  %s=%s", name, value)
    parallel, device = engine.topology.parallel, engine.topology.device
    layout = f"dp_replicate={parallel.dp_replicate} dp_shard={parallel.dp_shard} cp={parallel.cp}"
    log.info("%d samples, %d steps; %d processes on %s, %s", samples, total, engine.topology.size, device.type, layout)


def resume(engine: BaseEngine, config: TrainerConfig, output: Path, start: Cursor) -> tuple[int, Cursor]:
    """Load the checkpoint that `trainer.resume` names, if any.

    Args:
        engine: initialised.
        config: `trainer`.
        output: the run's folder.
        start: the cursor of a fresh run.

    Returns:
        the number of the first step to make, and the cursor of its batch.

    Raises:
        CheckpointError: the named checkpoint cannot be used, or was made with other data.
        ConfigError: the run's folder holds later checkpoints, which the next `resume=auto` would prefer to this run's.
    """
    root = output / "checkpoints"
    found: list[Any] = [None, []]
    if engine.topology.is_main:
        # The first rank decides: another might see the folder of a shared file system a moment later.
        found[1] = [folder.name for folder in steps(root)]
        if config.resume == "auto":
            manifest, skipped = latest(root)
            found[0] = None if manifest is None else manifest.folder
            for reason in skipped:
                log.warning("not resumed from: %s", reason)
    chosen, present = engine.topology.exchange(found)[0]
    if config.resume not in ("auto", "none"):
        chosen = Path(config.resume)
    first, cursor = 1, start
    if chosen is not None:
        restored = engine.load_checkpoint(chosen)
        first, cursor = restored.step + 1, _checked_cursor(chosen, restored.extra, start)
        another = "" if restored.same_layout else " (another layout: random state drawn anew)"
        log.info("resumed from %s, after step %d%s", chosen, restored.step, another)
    if config.resume != "auto" and present and present[-1] >= folder_name(first):
        raise ConfigError(
            f"trainer.output_dir={output} holds {present[-1]} of an earlier run, but trainer.resume={config.resume} starts at step "
            f"{first}; choose another folder, delete {root}, or set trainer.resume=auto to go on with it"
        )
    return first, cursor


def _checked_cursor(folder: Path, extra: Any, start: Cursor) -> Cursor:
    try:
        cursor = Cursor.from_json(extra["cursor"])
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{folder} says nothing of where in the data to go on; it was not saved by this trainer") from e
    for name, was, now in (("data.seed", cursor.seed, start.seed), ("the number of samples", cursor.samples, start.samples)):
        if was != now:
            raise CheckpointError(
                f"{folder} was saved with {name} = {was}, now it is {now}, so the next sample cannot be told; use the same data and "
                "seed, or start anew from the exported model in another trainer.output_dir"
            )
    return cursor

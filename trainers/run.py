"""From a config to a finished SFT run: data, engine, resume, loop, export."""

import datetime
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ..engine.base import BaseEngine
from ..engine.checkpoint.folder import folder_name, sweep
from ..engine.errors import ConfigError, DrivetrainError
from ..engine.export import export_hf
from ..engine.flops import known_peak_tflops
from ..engine.objective import OutputRequest
from ..engine.registry import engine_class
from ..engine.tokenizer import load_tokenizer
from ..engine.topology import agree, init_distributed
from ..workers.losses.sft import SFTLoss
from .config import SFTConfig
from .console import Summary
from .data.loader import Loader, Order
from .data.samples import Budget, Samples
from .data.tokenise import load_stores
from .generate import answers
from .loop import Evaluation, train
from .metrics import Logger, check_loggers, make_loggers, plot_loss
from .options import changes, differences, to_yaml
from .resume import resume
from .watch import Watch

log = logging.getLogger(__name__)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at that moment: a live line on the terminal lifts it above itself."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def run_sft(config: SFTConfig) -> None:
    """Train. Collective over all processes of the job.

    Raises:
        DrivetrainError: with the setting, the file or the row that is wrong; on every rank.
    """
    logging.basicConfig(format="%(message)s", handlers=[_Stderr()])
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
        ("trainer.patience", trainer.patience, 1),
        ("trainer.generate", trainer.generate, 0),
        ("trainer.generate_tokens", trainer.generate_tokens, 1),
        ("trainer.log_every", trainer.log_every, 1),
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
    for name, asked in (("trainer.best_metric", trainer.best_metric), ("trainer.generate", trainer.generate)):
        if asked and not data.eval:
            raise ConfigError(f"{name}={asked} needs data.eval, which is not set")
    if trainer.peak_tflops is not None and not trainer.peak_tflops > 0:
        raise ConfigError(f"trainer.peak_tflops={trainer.peak_tflops}; it must be more than 0")
    Watch(trainer.best_metric, trainer.patience)
    if config.model.head != "lm":
        raise ConfigError(f"model.head={config.model.head}: SFT trains a language-model head; set model.head=lm")
    check_loggers(trainer.loggers)


def _run(config: SFTConfig) -> None:
    output = Path(config.trainer.output_dir)
    tokenizer, samples, held_out = load_data(config)
    order = Order(samples.sizes, weights=config.data.weights, seed=config.data.seed, shuffle=config.data.shuffle)
    total = config.trainer.max_steps or config.trainer.epochs * -(-len(order) // config.data.batch_size)
    engine = engine_class(config.engine.backend)(
        model=config.model, engine=config.engine, optim=config.optim, total_steps=total
    ).initialize()
    try:
        if engine.topology.is_main:
            sweep(output / "checkpoints")
        _announce(engine, config, samples, total)
        loader = _loader(engine, config, samples, order)
        watch = Watch(config.trainer.best_metric, config.trainer.patience)
        start = resume(engine, config.trainer, output, loader, watch)
        _write_config(engine, config, output, resumed=start.step > 1)
        summary = Summary(total)
        with _loggers(engine, config, output, total, start.step - 1, summary) as loggers:
            ended = train(
                engine,
                SFTLoss(),
                loader,
                _evaluation(engine, config, held_out, tokenizer, loggers),
                config.trainer,
                loggers,
                watch,
                start=start,
                total=total,
                peak=_peak(engine, config),
            )
        left = {"checkpoints": str(output / "checkpoints")}
        if ended.why == "signal":
            log.info("stopped by SIGTERM after step %d, which is saved; the same command goes on from there", ended.step)
        elif ended.why == "patience":
            log.info(
                "stopped after step %d: %d evaluations without a better %s", ended.step, config.trainer.patience, watch.metric
            )
        elif ended.step < start.step:
            log.info("step %d of %d is done already; nothing to train", ended.step, total)
        if config.trainer.export_hf and ended.why != "signal":
            left |= _export(engine, config, output, watch, ended.step)
        if (output / "loss.png").is_file():
            left["loss plot"] = str(output / "loss.png")
        if engine.topology.is_main and "console" in config.trainer.loggers:
            print("\n".join(summary.lines(left)), flush=True)
    finally:
        engine.close()


def load_data(config: SFTConfig) -> tuple[Any, Samples, Samples | None]:
    """The tokenizer, training and held-out samples; an error of one rank is everybody's, before any weight is read."""
    error: Exception | None = None
    tokenizer: Any = None
    budget = sample_budget(config)
    try:
        make_folder(Path(config.trainer.output_dir))
        tokenizer = load_tokenizer(config.model)
    except DrivetrainError as e:
        error = e
    agree(error)
    found: list[Samples] = []
    for names, training in ((config.data.train, True), (config.data.eval, False)):
        if not names:
            continue
        stores = load_stores(names, tokenizer, config.data, training=training)
        try:
            found.append(Samples(stores, config.data, budget, names))
        except DrivetrainError as e:
            error = e
        agree(error)
    return tokenizer, found[0], found[1] if config.data.eval else None


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


def _loader(engine: BaseEngine, config: SFTConfig, samples: Samples, order: Order) -> Loader:
    return Loader(
        samples,
        order,
        batch_size=config.data.batch_size,
        dp_rank=engine.topology.dp_rank,
        dp_size=engine.topology.dp_size,
        ratio=engine.model_shape.attention_ratio,
    )


def _evaluation(
    engine: BaseEngine, config: SFTConfig, held_out: Samples | None, tokenizer: Any, loggers: list[Logger]
) -> Evaluation | None:
    if held_out is None:
        return None
    shown = [held_out[i] for i in range(min(config.trainer.generate, len(held_out)))]

    def tell(step: int) -> None:
        if shown:
            given = answers(engine, tokenizer, shown, config.trainer.generate_tokens, sample_budget(config).tokens)
            for logger in loggers:
                logger.answers(step, given)

    order = Order(held_out.sizes, weights=None, seed=0, shuffle=False)
    loss = SFTLoss(request=OutputRequest(log_probs=True, greedy=True))
    return Evaluation(loader=_loader(engine, config, held_out, order), loss=loss, tell=tell)


def _peak(engine: BaseEngine, config: SFTConfig) -> float | None:
    """FLOP/s that all devices together can do at most; None where nobody says."""
    each, device = config.trainer.peak_tflops, engine.topology.device
    if each is None and device.type == "cuda":
        each = known_peak_tflops(torch.cuda.get_device_name(device), config.engine.precision.compute)
    return None if each is None else each * 1e12 * engine.topology.size


@contextmanager
def _loggers(
    engine: BaseEngine, config: SFTConfig, output: Path, total: int, resumed: int, summary: Summary
) -> Iterator[list[Logger]]:
    """Loggers on the first rank, and a plot of the loss at the end, also of a run that failed; an error there is everybody's."""
    loggers: list[Logger] = []
    error: Exception | None = None
    if engine.topology.is_main:
        try:
            loggers = [*make_loggers(config.trainer, output, total, resumed, asdict(config)), summary]
        except OSError as e:
            error = ConfigError(f"trainer.output_dir={output} cannot be written: {e.strerror or e}")
        except Exception as e:  # raised on all ranks by agree
            error = e
    engine.topology.agree(error)
    try:
        yield loggers
    finally:
        try:
            for logger in loggers:
                logger.close()
            if loggers and (output / "metrics.jsonl").is_file():
                plot_loss(output / "metrics.jsonl", output / "loss.png", str(output))
        except OSError as e:
            # Disk full, say: it is told, but must not bury the error that the run may end with.
            log.warning("metrics or the plot of the loss could not be written to the end: %s", e.strerror or e)


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


def _announce(engine: BaseEngine, config: SFTConfig, samples: Samples, total: int) -> None:
    log.info("settings (all of them: %s/config.yaml)", config.trainer.output_dir)
    for name, value in changes(config).items():
        log.info("  %s=%s", name, value)
    parallel, device = engine.topology.parallel, engine.topology.device
    layout = f"dp_replicate={parallel.dp_replicate} dp_shard={parallel.dp_shard} cp={parallel.cp}"
    size = engine.topology.size
    log.info(
        "%d samples, %d steps; %d %s on %s, %s",
        len(samples),
        total,
        size,
        "process" if size == 1 else "processes",
        device.type,
        layout,
    )
    positions, longest = engine.model_shape.positions, int(samples.lengths.max())
    if positions is not None and longest > positions:
        log.warning(
            "%d samples are longer than the %d positions that the model was made for (max_position_embeddings), the longest has %d "
            "tokens; lower data.max_length, or scale the model's rope",
            int((samples.lengths > positions).sum()),
            positions,
            longest,
        )


def _export(engine: BaseEngine, config: SFTConfig, output: Path, watch: Watch, last: int) -> dict[str, str]:
    if watch.best_step is not None and watch.best_step != last:
        log.info("best %s: %.4g after step %d, which is exported", watch.metric, watch.best, watch.best_step)
        engine.load_checkpoint(output / "checkpoints" / folder_name(watch.best_step))
    left = {}
    if config.model.lora.rank > 0:
        left["adapter"] = str(export_hf(engine, output / "adapter", adapters="only"))
    return {**left, "model": str(export_hf(engine, output / "hf"))}

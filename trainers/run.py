"""A complete run from its configuration: data, engine, resuming, training and export."""

import atexit
import datetime
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..engine.base import BaseEngine
from ..engine.checkpoint.manager import CheckpointManager
from ..engine.checkpoint.retention import folder_name
from ..engine.errors import ConfigError
from ..engine.export import export_hf
from ..engine.flops import known_peak_tflops
from ..engine.parallel.collectives import call_on_first, collective_errors
from ..engine.parallel.process_groups import close_distributed, close_if_open, init_distributed
from ..engine.registry import engine_class
from .config.runs import RunConfig
from .config.trainer import TrainerConfig
from .data.dataset import TokenDataset
from .data.load import RunData, load_data
from .data.loader import Loader
from .data.order import Sampler
from .data.python_data import PythonData
from .data.stream import StreamLoader
from .data.tokenize import NO_PYTHON
from .hub import push
from .loop.answer_metrics import AnswerMetrics, Metric
from .loop.console import Lines, Summary
from .loop.early_stopping import EarlyStopping
from .loop.loggers import Logger, make_loggers, plot_metrics
from .loop.logs import configure_logging
from .loop.loop import StopReason, TrainResult, train
from .loop.parts import Callback, Evaluation, TrainingRun
from .loop.resume import resume
from .loop.samples import HeldOutCompletion, answers
from .loop.signals import StopSignal
from .methods.base import TrainingMethod
from .report import announce, report_end
from .run_folder import locked_folders, write_config
from .validate import check_run, early_stopping_of, sample_budget, unused_settings, warn_about_data

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The end of a run.

    Args:
        result: The end of training.
        outputs: The location of each output, by name.
    """

    result: TrainResult
    outputs: dict[str, str]

    @property
    def signal(self) -> int | None:
        """The signal that this process has received, if any."""
        return self.result.signal


@dataclass(frozen=True, kw_only=True)
class Extensions:
    """What a Python program adds to the settings.

    Args:
        data: Rows in memory, and what is applied to every row.
        metrics: Metrics of the generated answers, beside those of `trainer.metrics`.
        callbacks: Code that the training loop calls on every rank.
    """

    data: PythonData = NO_PYTHON
    metrics: Sequence[Metric] = ()
    callbacks: Sequence[Callback] = ()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run whose data are read and whose engine is initialized.

    Args:
        engine: The engine.
        config: The run's settings.
        method: The training method.
        data: The run's data.
        loader: The batches to train on.
        total_steps: The number of the last step.
        metrics: The metrics of the generated answers.
        callbacks: Code that the training loop calls on every rank.
    """

    engine: BaseEngine
    config: RunConfig
    method: TrainingMethod
    data: RunData
    loader: Loader | StreamLoader
    total_steps: int
    metrics: AnswerMetrics
    callbacks: Sequence[Callback]


def run(config: RunConfig, method: TrainingMethod, extensions: Extensions = Extensions()) -> RunOutcome:  # immutable
    """Run training from start to finish. Collective over all processes of the job.

    Args:
        config: The run's settings.
        method: The training method.
        extensions: What a Python program adds to the settings.

    Returns:
        How training ended, and where its outputs are.

    Raises:
        DrivetrainError: A setting, a file or a row is wrong; the message names it. Raised on all ranks. After an error the
            default process group is not destroyed if there are several processes, since the others may be waiting in it; end
            the process (`exit_process`).
    """
    configure_logging()
    check_run(config, method, extensions.metrics)
    with process_group(config), prepared(config, method, extensions) as ready:
        return _train(ready)


@contextmanager
def process_group(config: RunConfig) -> Iterator[None]:
    """Set up the default process group for the block. Collective over all processes of the job.

    With several processes it stays until the program ends: torchrun's store keeps the addresses of the first group, and a second one of the
    same name would read them and hang.

    Args:
        config: The run's settings.
    """
    atexit.unregister(close_if_open)
    init_distributed(datetime.timedelta(minutes=config.trainer.timeout_minutes))
    try:
        yield
    except BaseException:
        # With several ranks, destroying the NCCL groups would wait for ranks that may be stuck in a collective that this rank
        # never enters. The caller must end the process.
        if dist.get_world_size() == 1:
            close_distributed()
        raise
    if dist.get_world_size() == 1:
        close_distributed()
    else:
        atexit.register(close_if_open)


@contextmanager
def prepared(config: RunConfig, method: TrainingMethod, extensions: Extensions, *, lock: bool = True) -> Iterator[Prepared]:
    """Read the data and initialize the engine; free both after the block. Collective over all processes of the job.

    Args:
        config: The run's settings.
        method: The training method.
        extensions: What a Python program adds to the settings.
        lock: Whether the run's folders are created, and locked against other runs.

    Raises:
        DrivetrainError: A file, a row or the model cannot be used; raised on all ranks.
    """
    engine = engine_class(config.engine.backend)(model=config.model, engine=config.engine, optim=config.optim)
    with collective_errors():
        engine.check()
    with locked_folders(config.trainer) if lock else nullcontext():
        data = load_data(
            config,
            method.kind,
            sample_budget(config, method),
            extensions.data,
            # The engine has a topology only once it is initialized.
            gather=lambda value, error=None: engine.topology.all_gather_object(value, error=error),
            broadcast=lambda value, error=None: engine.topology.broadcast_object(value, error=error),
        )
        loader = _loader(config, data)
        steps = -(-len(loader) // config.data.batch_size) if isinstance(loader, Loader) else 0
        engine.total_steps = total_steps = config.trainer.max_steps or config.trainer.epochs * steps
        for line in unused_settings(config.optim, total_steps):
            log.warning("%s", line)
        try:
            method.setup(engine, data.tokenizer, data.source if isinstance(data.source, TokenDataset) else None, data.held_out)
            engine.initialize()
            announce(engine, config, data, loader, total_steps, written=lock)
            yield Prepared(
                engine=engine,
                config=config,
                method=method,
                data=data,
                loader=loader,
                total_steps=total_steps,
                metrics=AnswerMetrics.of(config.trainer.metrics, extensions.metrics),
                callbacks=extensions.callbacks,
            )
        finally:
            method.close()
            engine.close()


def _loader(config: RunConfig, data: RunData) -> Loader | StreamLoader:
    if not isinstance(data.source, TokenDataset):
        warn_about_data(config.data, config.data.batch_size, None)
        return StreamLoader(data.source, batch_size=config.data.batch_size)
    sampler = Sampler(data.train.sizes, weights=config.data.weights, seed=config.data.seed, shuffle=config.data.shuffle)
    warn_about_data(config.data, config.data.batch_size, len(sampler))
    weights = config.data.weights
    if weights is not None and min(weights) * len(sampler) < sum(weights):
        log.warning(
            "data.weights=%s: with %d samples per epoch, at least one source gets no samples in some epochs",
            weights,
            len(sampler),
        )
    return Loader(data.train, sampler, batch_size=config.data.batch_size)


def _train(ready: Prepared) -> RunOutcome:
    engine, config, method, data = ready.engine, ready.config, ready.method, ready.data
    output, total_steps = Path(config.trainer.output_dir), ready.total_steps
    loader = ready.loader
    early_stopping = early_stopping_of(config, method, ready.metrics, "" if data.held_out is None else data.held_out.digest)
    with _manager(engine, config.trainer) as manager:
        manager.sweep()
        start = resume(engine, manager, config, method.name, loader, early_stopping)
        if start.step <= total_steps:
            with engine.topology.collective_errors():
                if engine.topology.is_main:
                    write_config(config, resumed=start.step > 1)
            if config.trainer.save_every and start.step + config.trainer.save_every <= total_steps:
                manager.prepare()
        summary = Summary(total_steps)
        with _loggers(ready, start.step - 1, summary) as loggers:
            run = TrainingRun(
                engine=engine,
                method=method,
                loader=loader,
                evaluation=_evaluation(ready),
                manager=manager,
                config=config.trainer,
                loggers=loggers,
                early_stopping=early_stopping,
                export=lambda step: _export(engine, config, output / "exports" / folder_name(step)),
                total_steps=total_steps,
                peak_flops=_peak_flops(engine, config),
                callbacks=ready.callbacks,
            )
            result = train(run, start)
        manager.wait()
        report_end(result, start, run)
        outputs = {"checkpoints": str(manager.root)}
        if config.trainer.export_hf and result.reason is not StopReason.SIGNAL:
            outputs |= _export_best(engine, manager, config, early_stopping, result.step)
    if "jsonl" in config.trainer.loggers:
        outputs["loss plot"] = str(output / "loss.png")
    if engine.topology.is_main and "console" in config.trainer.loggers:
        print("\n".join(summary.lines(outputs)), flush=True)
    return RunOutcome(result=result, outputs=outputs)


def _manager(engine: BaseEngine, config: TrainerConfig) -> CheckpointManager:
    return CheckpointManager(
        engine,
        config.checkpoint_dir or Path(config.output_dir) / "checkpoints",
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        background=config.save_background,
        verify=config.verify_checksums,
    )


def _evaluation(ready: Prepared) -> Evaluation | None:
    config, held_out = ready.config, ready.data.held_out
    if held_out is None:
        return None
    # Take samples from across the entire file, since neighboring samples may belong to the same chat.
    count = min(config.trainer.generate, len(held_out))
    samples = [held_out[i * len(held_out) // count][0] for i in range(count)]
    budget = sample_budget(config, ready.method).tokens

    def generate(stop: StopSignal) -> list[HeldOutCompletion] | None:
        if not samples:
            return []
        return answers(ready.engine, ready.data.tokenizer, samples, config.trainer.generate_tokens, budget, stop)

    sampler = Sampler(held_out.sizes, weights=None, seed=0, shuffle=False)
    loader = Loader(held_out, sampler, batch_size=config.data.batch_size)
    return Evaluation(loader=loader, answers=generate, metrics=ready.metrics)


def _peak_flops(engine: BaseEngine, config: RunConfig) -> float | None:
    """Return the peak FLOP/s of all devices together, or None if it is not known."""
    per_device, device = config.trainer.peak_tflops, engine.topology.device
    if per_device is None and device.type == "cuda":
        per_device = known_peak_tflops(torch.cuda.get_device_name(device), engine.config.precision.compute)
    return None if per_device is None else per_device * 1e12 * engine.topology.size


@contextmanager
def _loggers(ready: Prepared, resumed_step: int, summary: Summary) -> Iterator[list[Logger]]:
    """Open the loggers on the first rank, and plot the loss at the end even if the run failed. Collective."""
    config, topology, lines = ready.config, ready.engine.topology, Lines(ready.metrics.names)
    output = Path(config.trainer.output_dir)
    loggers: list[Logger] = []
    with topology.collective_errors():
        if topology.is_main:
            try:
                made = make_loggers(config.trainer, output, ready.total_steps, resumed_step, asdict(config), lines)
                loggers = [*made, summary]
            except OSError as e:
                raise ConfigError(f"trainer.output_dir={output} cannot be written: {e.strerror or e}") from e
    try:
        yield loggers
    finally:
        try:
            for logger in loggers:
                logger.close()
            if loggers and "jsonl" in config.trainer.loggers:
                plot_metrics(output / "metrics.jsonl", output / "loss.png", str(output))
        except OSError as e:
            # An error such as a full disk is reported, but must not hide the error that may have ended the run.
            log.warning("the metrics or the loss plot could not be written completely: %s", e.strerror or e)


def _export_best(
    engine: BaseEngine, manager: CheckpointManager, config: RunConfig, early_stopping: EarlyStopping, last: int
) -> dict[str, str]:
    """Export the best checkpoint if a best metric is tracked, or else the model of the last step; return the paths by name."""
    best = early_stopping.best_step
    if best is not None and best != last:
        log.info("best %s: %.4g after step %d; exporting that checkpoint", early_stopping.metric, early_stopping.best, best)
        manager.restore_step(best)
    outputs = _export(engine, config, Path(config.trainer.output_dir))
    if config.trainer.push_to_hub:
        folder = outputs["adapter" if config.model.lora.rank > 0 else "model"]
        repo = config.trainer.push_to_hub
        outputs["Hub"] = call_on_first(lambda: push(Path(folder), repo), engine.topology.host)
    return outputs


def _export(engine: BaseEngine, config: RunConfig, folder: Path) -> dict[str, str]:
    outputs = {}
    if config.model.lora.rank > 0:
        outputs["adapter"] = str(export_hf(engine, folder / "adapter", adapters="only"))
    return {**outputs, "model": str(export_hf(engine, folder / "hf"))}

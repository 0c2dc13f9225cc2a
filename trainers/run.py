"""From a config to a finished run: data, engine, resume, loop, export."""

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
from ..engine.checkpoint.manager import CheckpointManager
from ..engine.checkpoint.retention import folder_name
from ..engine.errors import ConfigError, DrivetrainError
from ..engine.export import export_hf
from ..engine.flops import known_peak_tflops
from ..engine.parallel.collectives import agree
from ..engine.parallel.process_groups import close_distributed, init_distributed
from ..engine.registry import engine_class
from .config.parse import changes, differences, to_yaml
from .config.sections import RunConfig, TrainerConfig
from .data.dataset import Samples
from .data.encode import marked
from .data.loader import Loader, Order
from .hub import push
from .loop.console import Summary
from .loop.early_stopping import Watch
from .loop.loggers import Logger, make_loggers, plot_loss
from .loop.loop import Evaluation, train, written
from .loop.resume import resume
from .loop.samples import answers
from .loop.signals import StopSignal
from .methods.base import Method
from .validate import check_run, load_data, lock_folder, make_folder, sample_budget

log = logging.getLogger(__name__)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at that moment: a live line on the terminal lifts it above itself."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def run(config: RunConfig, method: Method) -> None:
    """Train. Collective over all processes of the job.

    Args:
        config: of the run.
        method: of training.

    Raises:
        DrivetrainError: with the setting, the file or the row that is wrong; on every rank. After an error the default process
            group of several processes is left as it is, since the others may be waiting in it; end the process (`leave`).
    """
    logging.basicConfig(format="%(message)s", handlers=[_Stderr()])
    logging.getLogger("drivetrain").setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    check_run(config, method)
    init_distributed(datetime.timedelta(minutes=config.trainer.timeout_minutes))
    try:
        _run(config, method)
    except BaseException:
        # Not with peers: NCCL's groups wait, while they are destroyed, for ranks that may be stuck in a collective which this
        # one never enters. Who called must end the process.
        if dist.get_world_size() == 1:
            close_distributed()
        raise
    close_distributed()


def _run(config: RunConfig, method: Method) -> None:
    output = Path(config.trainer.output_dir)
    engine = engine_class(config.engine.backend)(model=config.model, engine=config.engine, optim=config.optim)
    error: Exception | None = None
    locks: list[TextIO] = []
    try:
        engine.check()
        make_folder(output)
        elsewhere = config.trainer.checkpoint_dir
        if elsewhere and "://" not in elsewhere:
            make_folder(Path(elsewhere), "trainer.checkpoint_dir")
        if os.environ.get("RANK", "0") == "0":
            locks.append(lock_folder(output))
            if elsewhere and "://" not in elsewhere:
                locks.append(lock_folder(Path(elsewhere), "trainer.checkpoint_dir"))
    except DrivetrainError as e:
        error = e
    try:
        agree(error)
        _train(config, method, output, engine)
    finally:
        for lock in locks:
            lock.close()


def _train(config: RunConfig, method: Method, output: Path, engine: BaseEngine) -> None:
    tokenizer, samples, held_out = load_data(config, method)
    order = Order(samples.sizes, weights=config.data.weights, seed=config.data.seed, shuffle=config.data.shuffle)
    total = config.trainer.max_steps or config.trainer.epochs * -(-len(order) // config.data.batch_size)
    if not min(order.drawn):
        log.warning("data.weights=%s: %d samples an epoch leave a source without any", config.data.weights, len(order))
    engine.total_steps = total
    try:
        method.open(engine, tokenizer, samples, held_out)
        engine.initialize()
        _announce(engine, config, samples, order, total)
        shown = "\n  ".join(marked(tokenizer, document) for document in samples[0])
        log.info("first sample, what is learned of it between « and »:\n  %s", shown)
        loader = Loader(samples, order, batch_size=config.data.batch_size)
        evaluated = "" if held_out is None else held_out.digest
        watch = Watch(config.trainer.best_metric, config.trainer.patience, evaluated, method.lower_is_better)
        with _manager(engine, config.trainer, output) as manager:
            manager.sweep()
            start = resume(engine, manager, config, method.name, loader, watch)
            if start.step <= total:
                _write_config(engine, config, output, resumed=start.step > 1)
                if config.trainer.save_every and start.step + config.trainer.save_every <= total:
                    manager.prepare()
            summary = Summary(total)
            with _loggers(engine, config, output, total, start.step - 1, summary) as loggers:
                ended = train(
                    engine,
                    method,
                    loader,
                    _evaluation(engine, config, held_out, tokenizer, loggers, sample_budget(config, method).tokens),
                    manager,
                    config.trainer,
                    loggers,
                    watch,
                    export=lambda step: _export(engine, config, output / "exports" / folder_name(step)),
                    start=start,
                    total=total,
                    peak=_peak(engine, config),
                )
            manager.wait()
            left = {"checkpoints": str(manager.root)}
            if ended.why == "signal":
                log.info("stopped by a signal after step %d, which is saved; the same command goes on from there", ended.step)
            elif ended.why == "patience":
                log.info(
                    "stopped after step %d: %d evaluations without a better %s",
                    ended.step,
                    config.trainer.patience,
                    watch.metric,
                )
            elif ended.step < start.step:
                log.info("step %d of %d is done already; nothing to train", ended.step, total)
            if config.trainer.export_hf and ended.why != "signal":
                left |= _export_best(engine, manager, config, output, watch, ended.step)
        if "jsonl" in config.trainer.loggers:
            left["loss plot"] = str(output / "loss.png")
        if engine.topology.is_main and "console" in config.trainer.loggers:
            print("\n".join(summary.lines(left)), flush=True)
    finally:
        method.close()
        engine.close()


def _manager(engine: BaseEngine, config: TrainerConfig, output: Path) -> CheckpointManager:
    return CheckpointManager(
        engine,
        config.checkpoint_dir or output / "checkpoints",
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        background=config.save_background,
        verify=config.verify_checksums,
    )


def _evaluation(
    engine: BaseEngine, config: RunConfig, held_out: Samples | None, tokenizer: Any, loggers: list[Logger], budget: int
) -> Evaluation | None:
    if held_out is None:
        return None
    # From all over the file: neighbours may be answers of one chat.
    count = min(config.trainer.generate, len(held_out))
    shown = [held_out[i * len(held_out) // count][0] for i in range(count)]

    def tell(step: int, stop: StopSignal) -> None:
        if shown:
            given = answers(engine, tokenizer, shown, config.trainer.generate_tokens, budget, stop)

            def write() -> None:
                for logger in loggers:
                    logger.answers(step, given)

            engine.topology.agree(written(step, write))

    order = Order(held_out.sizes, weights=None, seed=0, shuffle=False)
    return Evaluation(loader=Loader(held_out, order, batch_size=config.data.batch_size), tell=tell)


def _peak(engine: BaseEngine, config: RunConfig) -> float | None:
    """FLOP/s that all devices together can do at most; None where nobody says."""
    each, device = config.trainer.peak_tflops, engine.topology.device
    if each is None and device.type == "cuda":
        each = known_peak_tflops(torch.cuda.get_device_name(device), config.engine.precision.compute)
    return None if each is None else each * 1e12 * engine.topology.size


@contextmanager
def _loggers(
    engine: BaseEngine, config: RunConfig, output: Path, total: int, resumed: int, summary: Summary
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
            if loggers and "jsonl" in config.trainer.loggers:
                plot_loss(output / "metrics.jsonl", output / "loss.png", str(output))
        except OSError as e:
            # Disk full, say: it is told, but must not bury the error that the run may end with.
            log.warning("metrics or the plot of the loss could not be written to the end: %s", e.strerror or e)


def _write_config(engine: BaseEngine, config: RunConfig, output: Path, *, resumed: bool) -> None:
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


def _announce(engine: BaseEngine, config: RunConfig, samples: Samples, order: Order, total: int) -> None:
    log.info("settings (all of them: %s/config.yaml)", config.trainer.output_dir)
    for name, value in changes(config).items():
        log.info("  %s=%s", name, value)
    parallel, device = engine.topology.parallel, engine.topology.device
    layout = " ".join(
        f"{axis}={size}".lower() for axis, size in asdict(parallel).items() if axis == "dp_shard" or size is True or size > 1
    )
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
    shape = engine.model_shape
    log.info("%d parameters, %d of them trained", shape.parameters, shape.parameters_trained)
    columns = (config.data.train, samples.sizes, order.drawn, samples.tokens, samples.apart)
    for name, size, drawn, tokens, apart in zip(*columns, strict=True):
        times = "" if drawn == size else f"; {drawn} an epoch ({drawn / size:.2f} times)"
        split = f"; {apart} chats, each answer a sample of its own (data.turns={config.data.turns})" if apart else ""
        log.info("  %s: %d samples, %d tokens%s%s", name, size, tokens, times, split)
    positions = engine.model_shape.positions
    if positions is not None:
        longer = int((samples.lengths > positions).any(1).sum())
        engine.warn_of_positions(int(samples.lengths.max()), f"the longest sample (of {longer} such)")


def _export_best(
    engine: BaseEngine, manager: CheckpointManager, config: RunConfig, output: Path, watch: Watch, last: int
) -> dict[str, str]:
    """Export what the run leaves: the best checkpoint where one is watched for, else the last step's model."""
    if watch.best_step is not None and watch.best_step != last:
        log.info("best %s: %.4g after step %d, which is exported", watch.metric, watch.best, watch.best_step)
        manager.restore_step(watch.best_step)
    left = _export(engine, config, output)
    if config.trainer.push_to_hub:
        folder = left["adapter" if config.model.lora.rank > 0 else "model"]
        left["Hub"] = push(engine.topology, Path(folder), config.trainer.push_to_hub)
    return left


def _export(engine: BaseEngine, config: RunConfig, folder: Path) -> dict[str, str]:
    left = {}
    if config.model.lora.rank > 0:
        left["adapter"] = str(export_hf(engine, folder / "adapter", adapters="only"))
    return {**left, "model": str(export_hf(engine, folder / "hf"))}

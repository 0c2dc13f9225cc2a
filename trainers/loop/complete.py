"""A run from its first step to its outputs: settings and loggers, the loop, the export of the best model."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from ...engine.errors import ConfigError
from .hub import push
from .loggers import make_loggers, plot_metrics
from .loop import StopReason, TrainResult, train
from .run_folder import warn_about_changes, write_config
from .training_run import TrainingRun

log = logging.getLogger(__name__)


def complete(run: TrainingRun) -> TrainResult:
    """Train to the end, export the best model, and print a summary. Collective.

    Args:
        run: The run, at its beginning or resumed.
    """
    with _open_loggers(run):
        result = train(run)
    # The last checkpoint must be on the disk before the run is reported as complete.
    run.wait()
    _report_end(run, result)
    if run.is_finished:
        warn_about_changes(run.settings, run.changed_data)
    outputs = {"checkpoints": run.checkpoint_root}
    # A run that a signal has stopped is to end soon; the resumed one exports.
    if run.config.export_hf and result.reason is not StopReason.SIGNAL:
        outputs |= _export_best(run)
    if "jsonl" in run.config.loggers:
        outputs[run.display.plot_name] = str(_plot_file(run))
    if run.ranks.is_first and "console" in run.config.loggers:
        command = run.display.next_command if "model" in outputs else ""
        locations = {**outputs, "next": f"{command} {run.config.output_dir}"} if command else outputs
        print("\n".join(run.display.summary.lines(locations)), flush=True)
    return replace(result, outputs=outputs)


@contextmanager
def _open_loggers(run: TrainingRun) -> Iterator[None]:
    """Write the settings and open the loggers on the first rank; plot the metrics at the end, even if the run fails. Collective."""
    config, folder = run.config, Path(run.config.output_dir)

    def open_loggers() -> None:
        # A run with nothing left to train keeps the settings of the one that has trained.
        if run.step < run.total_steps and not run.is_finished:
            write_config(run.settings, resumed=run.step > 0)
        try:
            loggers = make_loggers(config, folder, run.total_steps, run.step, asdict(run.settings), run.display.lines)
        except OSError as e:
            raise ConfigError(f"trainer.output_dir={folder} cannot be written: {e.strerror or e}") from e
        run.loggers = [*loggers, run.display.summary]

    run.ranks.run_on_rank0(open_loggers)
    try:
        yield
    finally:
        try:
            # Only the first rank has loggers.
            for logger in run.loggers:
                logger.close()
            if run.loggers and "jsonl" in config.loggers:
                plot_metrics(folder / "metrics.jsonl", _plot_file(run), str(folder), run.display.panels)
        except OSError as e:
            # Report an error such as a full disk, but do not hide the error that may have ended the run.
            log.warning("the metrics or their plot could not be written completely: %s", e.strerror or e)


def _plot_file(run: TrainingRun) -> Path:
    return Path(run.config.output_dir) / run.display.plot_file


def _report_end(run: TrainingRun, result: TrainResult) -> None:
    """Log why training ended, unless it has just completed all of its steps."""
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
    elif result.step == run.resumed_step:
        log.info("step %d of %d is already done; nothing to train", result.step, run.total_steps)


def _export_best(run: TrainingRun) -> dict[str, str]:
    """Export the best checkpoint if a best metric is tracked, or else the model of the last step; return the outputs by name."""
    stopping, config = run.early_stopping, run.config
    # The weights in memory are those of the last step.
    if stopping.best_step not in (None, run.step):
        log.info("best %s: %.4g after step %d; exporting that checkpoint", stopping.metric, stopping.best, stopping.best_step)
        run.restore_step(stopping.best_step)
    outputs = run.export(Path(config.output_dir))
    if (repo := config.push_to_hub) is not None:
        folder = Path(outputs.get("adapter", outputs["model"]))
        outputs["Hub"] = run.ranks.run_on_rank0(lambda: push(folder, repo))
    return outputs

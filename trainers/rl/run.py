"""Opens what the steps of a run need: groups, checkpoints, loggers, and the position to start from."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...engine.errors import CheckpointError, ConfigError
from ...rewards.pool import RewardTarget, title_of
from ..config.rl import RLConfig
from ..data.order import Cursor
from ..loop.early_stopping import EarlyStopping
from ..loop.loggers import Logger, make_loggers, plot_metrics
from ..run_folder import lock_folders, write_config
from .algorithms import Algorithm
from .checkpoints import RunCheckpoints
from .collect import Collector, Prompts
from .controllers import Controllers
from .metrics import PANELS, RLLines, RLSummary
from .phases import Phases
from .roles import Roles
from .session import open_phases
from .step_bundles import StepBundles

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class RLRun:
    """Everything that the steps of a run need.

    Args:
        phases: The phases.
        prompts: The prompts.
        collector: The collection of a step's answers.
        checkpoints: The checkpoints.
        bundles: The update of a step, and what repeats it elsewhere.
        controllers: The processes of the controller.
        loggers: The loggers; empty in processes that log nothing.
        early_stopping: The tracker of the best evaluation.
        start: The last completed step, and the position of the next prompt.
        total_steps: The number of the last step.
    """

    phases: Phases
    prompts: Prompts
    collector: Collector
    checkpoints: RunCheckpoints
    bundles: StepBundles
    controllers: Controllers
    loggers: Sequence[Logger]
    early_stopping: EarlyStopping
    start: tuple[int, Cursor]
    total_steps: int


def early_stopping_of(config: RLConfig, data: str) -> EarlyStopping:
    """Return the tracker of the best evaluation.

    Args:
        config: The settings.
        data: The digest of the held-out prompts.

    Raises:
        ConfigError: There is no such metric.
    """
    trainer, samples = config.trainer, config.rl.eval_samples
    names = ["reward", "accuracy", *([f"avg@{samples}", f"pass@{samples}"] if samples > 1 else [])]
    return EarlyStopping(trainer.best_metric, trainer.patience, data, dict.fromkeys(names, False), trainer.stopping_threshold)


@contextmanager
def open_run(
    config: RLConfig,
    algorithm: Algorithm,
    roles: Roles,
    prompts: Prompts,
    *,
    functions: Sequence[RewardTarget],
    total_steps: int,
) -> Iterator[RLRun]:
    """Open everything that the steps need, and plot the metrics at the end, even if the run failed.

    Args:
        config: The settings.
        algorithm: The algorithm.
        roles: The roles.
        prompts: The prompts.
        functions: Reward functions beside those that the settings name.
        total_steps: The number of the last step.

    Raises:
        DrivetrainError: Something cannot be opened; the message says what to do.
    """
    with ExitStack() as opened:
        if config.group.kind != "local":
            # Before models are loaded; with a local group only its processes can agree on an error.
            lock_folders(config.trainer, opened)
        sets = [prompts.train, *([prompts.held_out] if prompts.held_out else [])]
        phases, controllers = opened.enter_context(open_phases(config, algorithm, roles, functions=functions, prompts=sets))
        if config.group.kind == "local":
            controllers.run_on_rank0(lambda: lock_folders(config.trainer, opened))
        checkpoints = RunCheckpoints(config, phases.group, controllers)
        early_stopping = early_stopping_of(config, "" if prompts.held_out is None else prompts.held_out.digest)
        start = _resume(config, checkpoints, phases, prompts, early_stopping)
        loggers = _open_loggers(config, functions, controllers, start[0], total_steps)
        opened.callback(_close_loggers, config, loggers)
        yield RLRun(
            phases=phases,
            prompts=prompts,
            collector=Collector(config, phases, prompts),
            checkpoints=checkpoints,
            bundles=StepBundles(config, phases, controllers),
            controllers=controllers,
            loggers=loggers,
            early_stopping=early_stopping,
            start=start,
            total_steps=total_steps,
        )


def _resume(
    config: RLConfig, checkpoints: RunCheckpoints, phases: Phases, prompts: Prompts, early_stopping: EarlyStopping
) -> tuple[int, Cursor]:
    """Load the checkpoint to start from, if there is one; return the last completed step and the position of the next prompt."""
    restored = checkpoints.resume()
    if restored is None:
        return 0, Cursor()
    try:
        cursor = prompts.order.restore(restored.extra["data"], epochs=config.trainer.max_steps is None)
    except CheckpointError as e:
        raise CheckpointError(f"{restored.folder}: {e}") from e
    phases.adaptive.restore(restored.extra.get("adaptive", {}))
    early_stopping.restore(restored.extra.get("watch", {}))
    best = early_stopping.best_step
    if best is not None and not checkpoints.has(best):
        # It was loaded from another run's folder, or deleted by hand. What is not there cannot be exported.
        log.warning(
            "the checkpoint of the best %s, step %d, is not in %s; the search for the best starts over",
            early_stopping.metric,
            best,
            checkpoints.root,
        )
        early_stopping.reset()
    return restored.step, cursor


def _open_loggers(
    config: RLConfig, functions: Sequence[RewardTarget], controllers: Controllers, resumed: int, total_steps: int
) -> list[Logger]:
    loggers: list[Logger] = []
    output = Path(config.trainer.output_dir)

    def open_loggers() -> None:
        # Functions of the program stand there too, where they can be read; another one is another run.
        named = (*config.rewards.use, *(f"{f.__module__}:{title_of(f)}" for f in functions if not isinstance(f, str)))
        named += tuple(f for f in functions if isinstance(f, str))
        write_config(replace(config, rewards=replace(config.rewards, use=named)), resumed=resumed > 0)
        try:
            loggers.extend(make_loggers(config.trainer, output, total_steps, resumed, asdict(config), RLLines()))
        except OSError as e:
            raise ConfigError(f"trainer.output_dir={output} cannot be written: {e.strerror or e}") from e
        loggers.append(RLSummary(total_steps))

    controllers.run_on_rank0(open_loggers)
    return loggers


def _close_loggers(config: RLConfig, loggers: Sequence[Logger]) -> None:
    output = Path(config.trainer.output_dir)
    try:
        for logger in loggers:
            logger.close()
        if loggers and "jsonl" in config.trainer.loggers:
            plot_metrics(output / "metrics.jsonl", output / "rewards.png", str(output), PANELS)
    except OSError as e:
        # An error such as a full disk is reported, but must not hide the error that may have ended the run.
        log.warning("the metrics or their plot could not be written completely: %s", e.strerror or e)

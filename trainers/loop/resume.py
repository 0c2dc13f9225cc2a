"""Where a run starts: at its beginning, or behind the checkpoint that `trainer.resume` names."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...engine.base import BaseEngine
from ...engine.checkpoint.load import RestoredState
from ...engine.checkpoint.manager import CheckpointManager
from ...engine.checkpoint.retention import step_of
from ...engine.errors import CheckpointError, ConfigError
from ..config.runs import RunConfig
from ..data.loader import Cursor, Loader
from .early_stopping import EarlyStopping

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a run starts.

    Args:
        step: The number of the first step to make, from 1.
        cursor: The position of its batch in the data.
        run_metadata: What each of the run's checkpoints records of the run: its settings and its method.
        evaluate: Whether the evaluation of the step before was given up, for a SIGTERM, and is still to be made.
    """

    step: int
    cursor: Cursor
    run_metadata: Mapping[str, Any]
    evaluate: bool = False


def resume(
    engine: BaseEngine,
    manager: CheckpointManager,
    config: RunConfig,
    method: str,
    loader: Loader,
    early_stopping: EarlyStopping,
) -> ResumePoint:
    """Load the checkpoint that `trainer.resume` names, if there is one. Collective.

    Args:
        engine: The engine, initialized.
        manager: The run's checkpoints.
        config: The run's settings.
        method: The name of the method of training.
        loader: The training data.
        early_stopping: Its state is restored.

    Raises:
        CheckpointError: The named checkpoint cannot be used, or was made with other data.
        ConfigError: The run's folder holds later checkpoints, which the next `resume=auto` would prefer to this run's.
    """
    present = manager.present()
    point = ResumePoint(step=1, cursor=Cursor(), run_metadata={"config": asdict(config), "method": method})
    restored = _restore(manager, config.trainer.resume)
    if restored is not None:
        checkpoint, state = restored
        _check_same_run(engine, config, method, checkpoint, state)
        point = ResumePoint(
            step=state.step + 1,
            cursor=_restore_cursor(loader, config, checkpoint, state),
            run_metadata=point.run_metadata,
            evaluate=bool(state.extra.get("evaluate")),
        )
        _restore_early_stopping(early_stopping, manager, state, present)
        layout = "" if state.same_layout else " (another layout: random state drawn anew)"
        log.info("resumed from %s, after step %d%s", checkpoint, state.step, layout)
    _check_no_later(manager, config, point, present)
    return point


def _restore(manager: CheckpointManager, setting: str) -> tuple[str, RestoredState] | None:
    if setting == "none":
        return None
    return manager.restore_last() if setting == "auto" else manager.restore(setting)


def _check_same_run(engine: BaseEngine, config: RunConfig, method: str, checkpoint: str, state: RestoredState) -> None:
    made_by = state.extra.get("method", method)
    if made_by != method:
        raise CheckpointError(
            f"{checkpoint} is from a {made_by} run, this one is {method}, which cannot resume from it; choose another "
            "trainer.output_dir, and give the model that the other run exported as model.path"
        )
    # The first rank's: another machine's copy of the model is not looked at.
    fingerprint = engine.topology.all_gather_object(engine.model_fingerprint)[0]
    if state.fingerprint is not None and state.fingerprint != fingerprint:
        raise CheckpointError(
            f"{checkpoint} was trained from model.path={state.model}, now it is {config.model.path}, another model, whose weights would not be "
            "read; choose another trainer.output_dir"
        )
    saved_by = state.extra.get("config", {}).get("trainer", {}).get("output_dir")
    if config.trainer.resume == "auto" and saved_by is not None and Path(saved_by) != Path(config.trainer.output_dir):
        log.warning("%s was saved by the run in %s; this run resumes from it", checkpoint, saved_by)


def _restore_cursor(loader: Loader, config: RunConfig, checkpoint: str, state: RestoredState) -> Cursor:
    if "data" not in state.extra:
        log.warning(
            "%s records no position in the data, as one of another program: the data start at their beginning", checkpoint
        )
        return Cursor()
    try:
        return loader.restore(state.extra["data"], epochs=config.trainer.max_steps is None)
    except CheckpointError as e:
        raise CheckpointError(f"{checkpoint}: {e}") from e


def _restore_early_stopping(
    early_stopping: EarlyStopping, manager: CheckpointManager, state: RestoredState, present: list[str]
) -> None:
    early_stopping.restore(state.extra.get("watch", {}))
    best = early_stopping.best_step
    if best is not None and best not in {(step_of(name) or (0, 0))[0] for name in present}:
        # Taken from another run's folder, or deleted by hand: what is not there cannot be exported.
        log.warning(
            "the checkpoint of the best %s, step %d, is not in %s; the best is looked for anew",
            early_stopping.metric,
            best,
            manager.root,
        )
        early_stopping.reset()


def _check_no_later(manager: CheckpointManager, config: RunConfig, point: ResumePoint, present: list[str]) -> None:
    latest = (step_of(present[-1]) or (0, 0))[0] if present else 0
    if config.trainer.resume != "auto" and present and latest >= point.step:
        raise ConfigError(
            f"{manager.root} holds {present[-1]} of an earlier run, but trainer.resume={config.trainer.resume} starts at step {point.step}; "
            "choose another trainer.output_dir, delete it, or set trainer.resume=auto to resume from it"
        )

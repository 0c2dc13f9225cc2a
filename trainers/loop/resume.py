"""The starting point of a run: its beginning, or the checkpoint that `trainer.resume` names."""

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
from ...engine.parallel.collectives import call_on_first
from ..config.runs import RunConfig
from ..data.loader import Batches
from ..data.order import Cursor
from .early_stopping import EarlyStopping

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The point at which a run starts.

    Args:
        step: The number of the first step to take, starting from 1.
        cursor: The position of the batch of that step in the data.
        run_metadata: The settings and the method of the run, which each of its checkpoints records.
        evaluate: Whether the evaluation of the previous step was interrupted by a SIGTERM and still has to be done.
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
    loader: Batches,
    early_stopping: EarlyStopping,
) -> ResumePoint:
    """Load the checkpoint that `trainer.resume` names, if there is one. Collective.

    Args:
        engine: The initialized engine.
        manager: The run's checkpoints.
        config: The run's settings.
        method: The name of the training method.
        loader: The training data.
        early_stopping: The tracker of the best evaluation, whose state is restored.

    Raises:
        CheckpointError: The named checkpoint cannot be used, or was saved with different data.
        ConfigError: The run's folder contains later checkpoints, which the next `resume=auto` would prefer to those of this
            run.
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
        layout = "" if state.same_layout else " (different layout: new random state)"
        log.info("resumed from %s, after step %d%s", checkpoint, state.step, layout)
    _check_no_later(manager, config, point, present)
    return point


def _restore(manager: CheckpointManager, setting: str) -> tuple[str, RestoredState] | None:
    if setting == "none":
        return None
    return manager.restore_last() if setting == "auto" else manager.restore(setting)


def _check_same_run(engine: BaseEngine, config: RunConfig, method: str, checkpoint: str, state: RestoredState) -> None:
    saved_method = state.extra.get("method", method)
    if saved_method != method:
        raise CheckpointError(
            f"{checkpoint} is from a {saved_method} run, and this {method} run cannot resume from it; choose another "
            "trainer.output_dir, and set model.path to the model that the other run exported"
        )
    # Compare the fingerprint of the first rank only; the copies of the model on other machines are not checked.
    fingerprint = call_on_first(lambda: engine.model_fingerprint, engine.topology.host)
    if state.fingerprint is not None and state.fingerprint != fingerprint:
        raise CheckpointError(
            f"{checkpoint} was trained from model.path={state.model}, but it is now {config.model.path}, a different model, "
            "whose weights would not be read; choose another trainer.output_dir"
        )
    saved_by = state.extra.get("config", {}).get("trainer", {}).get("output_dir")
    if config.trainer.resume == "auto" and saved_by is not None and Path(saved_by) != Path(config.trainer.output_dir):
        log.warning("%s was saved by the run in %s; this run resumes from it", checkpoint, saved_by)


def _restore_cursor(loader: Batches, config: RunConfig, checkpoint: str, state: RestoredState) -> Cursor:
    if "data" not in state.extra:
        log.warning(
            "%s records no position in the data, since it is from another program; the data starts from the beginning",
            checkpoint,
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
        # It was loaded from another run's folder, or deleted by hand. A checkpoint that is not present cannot be exported.
        log.warning(
            "the checkpoint of the best %s, step %d, is not in %s; the search for the best starts over",
            early_stopping.metric,
            best,
            manager.root,
        )
        early_stopping.reset()


def _check_no_later(manager: CheckpointManager, config: RunConfig, point: ResumePoint, present: list[str]) -> None:
    latest = (step_of(present[-1]) or (0, 0))[0] if present else 0
    if config.trainer.resume != "auto" and present and latest >= point.step:
        raise ConfigError(
            f"{manager.root} contains {present[-1]} of an earlier run, but trainer.resume={config.trainer.resume} starts at "
            f"step {point.step}; choose another trainer.output_dir, delete it, or set trainer.resume=auto to resume from it"
        )

"""Where a run goes on: the checkpoint that `trainer.resume` names, and what it says of the data."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...engine.base import BaseEngine
from ...engine.checkpoint.manager import CheckpointManager
from ...engine.checkpoint.retention import step_of
from ...engine.errors import CheckpointError, ConfigError
from ..config.sections import RunConfig
from ..data.loader import Cursor, Loader
from .early_stopping import Watch

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run begins with.

    Args:
        step: number of the first step to make, from 1.
        cursor: of its batch.
        told: what each of the run's checkpoints says of it: its settings.
        evaluate: the evaluation of the step before was given up, for a SIGTERM, and is still to be made.
    """

    step: int
    cursor: Cursor
    told: Mapping[str, Any]
    evaluate: bool = False


def resume(
    engine: BaseEngine, manager: CheckpointManager, config: RunConfig, method: str, loader: Loader, watch: Watch
) -> Start:
    """Load the checkpoint that `trainer.resume` names, if any. Collective.

    Args:
        engine: initialised.
        manager: of the run's checkpoints.
        config: of the run.
        method: of training, by name.
        loader: of the training data.
        watch: over evaluations; takes back what it knew.

    Raises:
        CheckpointError: the named checkpoint cannot be used, or was made with other data.
        ConfigError: the run's folder holds later checkpoints, which the next `resume=auto` would prefer to this run's.
    """
    present = manager.present()
    numbers = [(step_of(name) or (0, 0))[0] for name in present]
    told = {"config": asdict(config), "method": method}
    start = Start(step=1, cursor=Cursor(), told=told)
    found = None
    if config.trainer.resume == "auto":
        found = manager.restore_last()
    elif config.trainer.resume != "none":
        found = manager.restore(config.trainer.resume)
    if found is not None:
        chosen, restored = found
        made_by = restored.extra.get("method", method)
        if made_by != method:
            raise CheckpointError(
                f"{chosen} is of a run of {made_by}, this one is {method}: it cannot be gone on with; choose another trainer.output_dir, and give "
                "the model that the other run exported as model.path"
            )
        # The first rank's: another machine's copy of the model is not looked at.
        now = engine.topology.all_gather_object(engine.model_fingerprint)[0]
        if restored.fingerprint is not None and restored.fingerprint != now:
            raise CheckpointError(
                f"{chosen} was trained from model.path={restored.model}, now it is {config.model.path}, another model, whose weights would not be "
                "read; choose another trainer.output_dir"
            )
        saved_by = restored.extra.get("config", {}).get("trainer", {}).get("output_dir")
        if config.trainer.resume == "auto" and saved_by is not None and Path(saved_by) != Path(config.trainer.output_dir):
            log.warning("%s was saved by the run in %s; this one goes on with it", chosen, saved_by)
        if "data" not in restored.extra:
            log.warning("%s says nothing of data, as one of another program: they begin at their beginning", chosen)
        try:
            start = Start(
                step=restored.step + 1,
                cursor=loader.restore(restored.extra["data"], epochs=config.trainer.max_steps is None)
                if "data" in restored.extra
                else Cursor(),
                told=told,
                evaluate=bool(restored.extra.get("evaluate")),
            )
        except CheckpointError as e:
            raise CheckpointError(f"{chosen}: {e}") from e
        watch.restore(restored.extra.get("watch", {}))
        if watch.best_step is not None and watch.best_step not in numbers:
            # Taken from another run's folder, or deleted by hand: what is not there cannot be exported.
            log.warning(
                "the checkpoint of the best %s, step %d, is not in %s; it is looked for anew",
                watch.metric,
                watch.best_step,
                manager.root,
            )
            watch.forget()
        another = "" if restored.same_layout else " (another layout: random state drawn anew)"
        log.info("resumed from %s, after step %d%s", chosen, restored.step, another)
    if config.trainer.resume != "auto" and numbers and numbers[-1] >= start.step:
        raise ConfigError(
            f"{manager.root} holds {present[-1]} of an earlier run, but trainer.resume={config.trainer.resume} starts at step {start.step}; "
            "choose another trainer.output_dir, delete it, or set trainer.resume=auto to go on with it"
        )
    return start

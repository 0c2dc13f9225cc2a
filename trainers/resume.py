"""Where a run goes on: the checkpoint that `trainer.resume` names, and what it says of the data."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ..engine.base import BaseEngine
from ..engine.checkpoint.folder import folder_name
from ..engine.checkpoint.manager import CheckpointManager
from ..engine.errors import CheckpointError, ConfigError
from ..engine.model_path import fingerprint
from .config import TrainerConfig
from .data.loader import Cursor, Loader
from .watch import Watch

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run begins with.

    Args:
        step: number of the first step to make, from 1.
        cursor: of its batch.
        model: which one the run began with, for its checkpoints: its path and fingerprint.
        evaluate: the evaluation of the step before was given up, for a SIGTERM, and is still to be made.
    """

    step: int
    cursor: Cursor
    model: Mapping[str, str]
    evaluate: bool = False


def resume(
    engine: BaseEngine, manager: CheckpointManager, config: TrainerConfig, loader: Loader, watch: Watch, model_path: str
) -> Start:
    """Load the checkpoint that `trainer.resume` names, if any. Collective.

    Args:
        engine: initialised.
        manager: of the run's checkpoints.
        config: `trainer`.
        loader: of the training data.
        watch: over evaluations; takes back what it knew.
        model_path: `model.path`, whose weights a resumed run would not read.

    Raises:
        CheckpointError: the named checkpoint cannot be used, or was made with other data.
        ConfigError: the run's folder holds later checkpoints, which the next `resume=auto` would prefer to this run's.
    """
    present = manager.present()
    # Told once, by one rank: every checkpoint of the run says it.
    model = {"path": model_path, "fingerprint": engine.topology.exchange(fingerprint(model_path))[0]}
    start = Start(step=1, cursor=Cursor(), model=model)
    found = None
    if config.resume == "auto":
        found = manager.restore_last()
    elif config.resume != "none":
        found = manager.restore(config.resume)
    if found is not None:
        chosen, restored = found
        was = restored.extra.get("model", {})
        if was and was["fingerprint"] != model["fingerprint"]:
            raise CheckpointError(
                f"{chosen} was trained from model.path={was['path']}, now it is {model_path}, another model, whose weights would not be "
                "read; choose another trainer.output_dir"
            )
        if "data" not in restored.extra:
            log.warning("%s says nothing of data, as one of another program: they begin at their beginning", chosen)
        try:
            start = Start(
                step=restored.step + 1,
                cursor=loader.restore(restored.extra["data"], epochs=config.max_steps is None)
                if "data" in restored.extra
                else Cursor(),
                model=model,
                evaluate=bool(restored.extra.get("evaluate")),
            )
        except CheckpointError as e:
            raise CheckpointError(f"{chosen}: {e}") from e
        watch.restore(restored.extra.get("watch", {}))
        if watch.best_step is not None and folder_name(watch.best_step) not in present:
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
    if config.resume != "auto" and present and present[-1] >= folder_name(start.step):
        raise ConfigError(
            f"{manager.root} holds {present[-1]} of an earlier run, but trainer.resume={config.resume} starts at step {start.step}; "
            "choose another trainer.output_dir, delete it, or set trainer.resume=auto to go on with it"
        )
    return start

"""Where a run goes on: the checkpoint that `trainer.resume` names, and what it says of the data."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.base import BaseEngine
from ..engine.checkpoint.folder import folder_name, latest, steps
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


def resume(engine: BaseEngine, config: TrainerConfig, output: Path, loader: Loader, watch: Watch, model_path: str) -> Start:
    """Load the checkpoint that `trainer.resume` names, if any. Collective.

    Args:
        engine: initialised.
        config: `trainer`.
        output: the run's folder.
        loader: of the training data.
        watch: over evaluations; takes back what it knew.
        model_path: `model.path`, whose weights a resumed run would not read.

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
    # Told once, by one rank: every checkpoint of the run says it.
    model = {"path": model_path, "fingerprint": engine.topology.exchange(fingerprint(model_path))[0]}
    start = Start(step=1, cursor=Cursor(), model=model)
    if chosen is not None:
        restored = engine.load_checkpoint(chosen)
        was = restored.extra.get("model", {})
        if was and was["fingerprint"] != model["fingerprint"]:
            raise CheckpointError(
                f"{chosen} was trained from model.path={was['path']}, now it is {model_path}, another model, whose weights would not be "
                "read; choose another trainer.output_dir"
            )
        try:
            start = Start(
                step=restored.step + 1,
                cursor=loader.restore(restored.extra.get("data", {}), epochs=config.max_steps is None),
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
                root,
            )
            watch.forget()
        another = "" if restored.same_layout else " (another layout: random state drawn anew)"
        log.info("resumed from %s, after step %d%s", chosen, restored.step, another)
    if config.resume != "auto" and present and present[-1] >= folder_name(start.step):
        raise ConfigError(
            f"trainer.output_dir={output} holds {present[-1]} of an earlier run, but trainer.resume={config.resume} starts at step "
            f"{start.step}; choose another folder, delete {root}, or set trainer.resume=auto to go on with it"
        )
    return start

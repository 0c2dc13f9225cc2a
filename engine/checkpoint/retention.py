"""The checkpoints of one run side by side: names, the last complete one, rotation. Imports no torch."""

import logging
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from ..errors import CheckpointError
from .manifest import Manifest
from .storage import DELETED, MANIFEST, TEMPORARY, LocalStore, Store, open_store

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})(?:\+(\d+))?")


def folder_name(step: int) -> str:
    """`step-00000100`."""
    return f"step-{step:08d}"


def step_of(name: str) -> tuple[int, int] | None:
    """A checkpoint folder's step, and which attempt at it this is; None for a folder of another name."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or 0))


def steps(root: Store) -> list[str]:
    """Names of checkpoint folders, oldest first, complete or not."""
    found = {name: step_of(name) for name in root.folders()}
    return sorted((name for name, step in found.items() if step is not None), key=lambda name: found[name] or (0, 0))


def recover(root: Store) -> None:
    """Give complete checkpoints back the name that a crash has kept from them: when a step is saved a second time, there is an
    instant at which neither the old folder nor the new one has it. Nobody else may be saving."""
    if not isinstance(root, LocalStore):
        return
    for prefix in (TEMPORARY, DELETED):
        for name in root.folders():
            final = name.removeprefix(prefix).rpartition("-")[0]
            if name.startswith(prefix) and step_of(final) is not None and not (root.path / final).exists():
                try:
                    Manifest.read(root.child(name))
                except CheckpointError:
                    continue
                (root.path / name).rename(root.path / final)
                log.warning("%s/%s was complete and is taken back", root, final)


def newest_first(root: Store) -> Iterator[tuple[str, Manifest | CheckpointError]]:
    """Checkpoint folders, the last one first, each with its manifest or why it has none that can be used."""
    for name in reversed(steps(root)):
        try:
            yield name, Manifest.read(root.child(name))
        except CheckpointError as e:
            yield name, e


def latest(root: Store) -> tuple[Manifest | None, list[str]]:
    """The last complete checkpoint, and why later ones were passed over."""
    skipped: list[str] = []
    for _, found in newest_first(root):
        if isinstance(found, Manifest):
            return found, skipped
        skipped.append(str(found))
    return None, skipped


def find_checkpoint(where: Path | str) -> Manifest:
    """The checkpoint at a path or URL: itself, or the last complete one of a run or of a folder of checkpoints.

    Raises:
        CheckpointError: there is none.
    """
    store, root = open_store(where), find_root(where)
    if root is not None:
        manifest, skipped = latest(root)
        if manifest is None:
            raise CheckpointError(f"{root} has no complete checkpoint: {'; '.join(skipped)}")
        for reason in skipped:
            log.warning("passed over: %s", reason)
        return manifest
    if store.size(MANIFEST) is None and isinstance(store, LocalStore):
        raise CheckpointError(_what_else(store.path))
    return Manifest.read(store)


def find_root(where: Path | str) -> Store | None:
    """The folder of checkpoints at a path or URL: itself, or that of a run; None where there are none."""
    store = open_store(where)
    return next((root for root in (store, store.child("checkpoints"), *_elsewhere(store)) if steps(root)), None)


def _elsewhere(store: Store) -> Iterator[Store]:
    """Where a run's settings say that its checkpoints are."""
    if store.size("config.yaml") is not None:
        import yaml

        try:
            found = yaml.safe_load(store.read("config.yaml"))["trainer"]["checkpoint_dir"]
        except (yaml.YAMLError, KeyError, TypeError):
            return
        if isinstance(found, str):
            log.warning("%s: its checkpoints are in %s (trainer.checkpoint_dir of its config.yaml)", store, found)
            yield open_store(found)


def _what_else(path: Path) -> str:
    """What a path is that is no checkpoint, and what it is for."""
    if not path.exists():
        return f"{path} does not exist"
    if not path.is_dir():
        return f"{path} is a file; give the folder of a checkpoint or of a run"
    if (path / ".metadata").is_file() or any(path.glob("model_world_size_*_rank_*.pt")):
        return f"{path} is a checkpoint of another program; take it over with: drivetrain import {path} OUT --model MODEL"
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        return f"{path} is a Hugging Face folder, and no checkpoint"
    runs = sorted(p.name for p in path.iterdir() if (p / "checkpoints").is_dir())
    if runs:
        return f"{path} is no checkpoint, but a folder of runs: {', '.join(runs[:5])}"
    return f"{path} is no complete checkpoint: it has no {MANIFEST}"


def rotate(
    root: Store,
    keep_last: int | None,
    *,
    newest: int,
    keep_every: int | None = None,
    keep: Collection[int] = (),
    damaged: Collection[str] = (),
) -> None:
    """Delete old checkpoints.

    Args:
        root: folder of all checkpoints of a run.
        keep_last: how many to keep; None keeps all.
        newest: the step just saved. Later folders are damaged ones that were passed over.
        keep_every: those of every so many steps stay too.
        keep: steps that stay.
        damaged: names that do not count as kept, as those without a manifest do not; they go with the good ones of their age.
    """
    if keep_last is None:
        return
    numbers = {name: (step_of(name) or (0, 0))[0] for name in steps(root)}
    names = [name for name, number in numbers.items() if number <= newest]
    good = [name for name in names if name not in damaged and root.child(name).size(MANIFEST) is not None]
    if len(good) <= max(1, keep_last):
        return
    oldest = numbers[good[-max(1, keep_last)]]
    for name in names:
        number = numbers[name]
        if number < oldest and number not in keep and not (keep_every and number % keep_every == 0):
            root.remove(name)

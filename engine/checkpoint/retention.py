"""The folder names, lookup and rotation of a run's checkpoints."""

import logging
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from ..errors import CheckpointError, NoCheckpointError
from .manifest import CheckpointManifest
from .storage import DELETED, MANIFEST, TEMPORARY, LocalStore, Store, open_store

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})(?:\+(\d+))?")


def folder_name(step: int) -> str:
    """Return the folder name of a step, such as `step-00000100`."""
    return f"step-{step:08d}"


def step_of(name: str) -> tuple[int, int] | None:
    """Return the step and the attempt number of a checkpoint folder; None for a folder with another kind of name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def steps(root: Store) -> list[str]:
    """Return the names of checkpoint folders, oldest first, complete or not."""
    numbers = {name: step_of(name) for name in root.folders()}
    return sorted((name for name, step in numbers.items() if step is not None), key=lambda name: numbers[name] or (0, 0))


def recover(root: Store) -> None:
    """Restore the names of complete checkpoints after a crash. No other process may be saving.

    When a step is saved a second time, there is a moment at which neither the old folder nor the new one has the final name.
    """
    if not isinstance(root, LocalStore):
        return
    # The newer folder, which still has its temporary name, comes first. If it is complete it takes the name, and
    # `sweep` deletes the older one.
    for prefix in (TEMPORARY, DELETED):
        for name in root.folders():
            final = name.removeprefix(prefix).rpartition("-")[0]
            if name.startswith(prefix) and step_of(final) is not None and not (root.path / final).exists():
                try:
                    CheckpointManifest.read(root.child(name))
                except CheckpointError:
                    continue
                (root.path / name).rename(root.path / final)
                log.warning("%s/%s is complete and was recovered after a crash", root, final)


def newest_first(root: Store) -> Iterator[tuple[str, CheckpointManifest | CheckpointError]]:
    """Yield checkpoint folders, newest first, each with its manifest or the reason why it has no usable one."""
    for name in reversed(steps(root)):
        try:
            yield name, CheckpointManifest.read(root.child(name))
        except CheckpointError as e:
            yield name, e


def latest(root: Store) -> tuple[CheckpointManifest | None, list[str]]:
    """Return the last complete checkpoint and the reasons why later ones were skipped."""
    skipped: list[str] = []
    for _, candidate in newest_first(root):
        if isinstance(candidate, CheckpointManifest):
            return candidate, skipped
        skipped.append(str(candidate))
    return None, skipped


def find_checkpoint(where: Path | str) -> CheckpointManifest:
    """Return the checkpoint at a path or URL: the folder itself, or the last complete one of a run or of a checkpoint folder.

    Raises:
        NoCheckpointError: The path is something else, or does not exist.
        CheckpointError: The checkpoint is incomplete or damaged.
    """
    store, root = open_store(where), find_root(where)
    if root is not None:
        manifest, skipped = latest(root)
        if manifest is None:
            raise CheckpointError(f"{root} has no complete checkpoint: {'; '.join(skipped)}")
        for reason in skipped:
            log.warning("checkpoint skipped: %s", reason)
        return manifest
    if store.size(MANIFEST) is None and isinstance(store, LocalStore):
        raise NoCheckpointError(_describe_other(store.path))
    return CheckpointManifest.read(store)


def find_root(where: Path | str) -> Store | None:
    """Return the folder of checkpoints at a path or URL: the folder itself, or that of a run; None if there are none."""
    store = open_store(where)
    return next((root for root in (store, store.child("checkpoints"), *_configured_root(store)) if steps(root)), None)


def _configured_root(store: Store) -> Iterator[Store]:
    """Yield the checkpoint folder that is configured in a run's settings."""
    if store.size("config.yaml") is not None:
        import yaml

        try:
            folder = yaml.safe_load(store.read("config.yaml"))["trainer"]["checkpoint_dir"]
        except (yaml.YAMLError, KeyError, TypeError):
            return
        if isinstance(folder, str):
            log.warning("%s: its checkpoints are in %s (trainer.checkpoint_dir in its config.yaml)", store, folder)
            yield open_store(folder)


def _describe_other(path: Path) -> str:
    """Describe a path that is not a checkpoint, and how to use it."""
    way_out = "give the folder of a run or of a checkpoint"
    if not path.exists():
        return f"{path} does not exist; {way_out}"
    if not path.is_dir():
        return f"{path} is a file; {way_out}"
    if (path / ".metadata").is_file() or any(path.glob("model_world_size_*_rank_*.pt")):
        return f"{path} is a checkpoint of another program; import it with: drivetrain import {path} OUT --model MODEL"
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        return f"{path} is a Hugging Face folder, not a checkpoint; {way_out}"
    if all((path / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        return (
            f"{path} is a run that has not saved a checkpoint; start it again, with trainer.save_every for more frequent ones"
        )
    runs = sorted(p.name for p in path.iterdir() if (p / "checkpoints").is_dir())
    if runs:
        return f"{path} is not a checkpoint but a folder of runs: {', '.join(runs[:5])}; give one of them"
    return f"{path} is not a complete checkpoint: it has no {MANIFEST}; {way_out}"


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
        root: The folder of all checkpoints of a run.
        keep_last: The number of checkpoints to keep; None keeps all.
        newest: The step just saved. Later folders are damaged ones that were skipped.
        keep_every: The step interval at which checkpoints are kept permanently; None for none.
        keep: The steps whose checkpoints are kept.
        damaged: The names of damaged checkpoints. Like folders without a manifest, they do not count toward `keep_last`;
            they are deleted together with the good ones of their age.
    """
    if keep_last is None:
        return
    numbers = {name: (step_of(name) or (0, 0))[0] for name in steps(root)}
    names = [name for name, number in numbers.items() if number <= newest]
    good = [name for name in names if name not in damaged and root.child(name).size(MANIFEST) is not None]
    if len(good) <= max(1, keep_last):
        return
    # All older ones are deleted, except those that are kept permanently. At least one good checkpoint stays.
    oldest = numbers[good[-max(1, keep_last)]]
    for name in names:
        number = numbers[name]
        if number < oldest and number not in keep and not (keep_every and number % keep_every == 0):
            root.remove(name)

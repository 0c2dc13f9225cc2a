"""The checkpoints of one run side by side: names, the last complete one, rotation. Imports no torch."""

from collections.abc import Collection, Iterator
from pathlib import Path

from ..errors import CheckpointError
from .manifest import Manifest
from .storage import Store, open_store

PREFIX = "step-"


def folder_name(step: int) -> str:
    """`step-00000100`."""
    return f"{PREFIX}{step:08d}"


def steps(root: Store) -> list[str]:
    """Names of checkpoint folders, oldest first, complete or not."""
    return [name for name in root.folders() if name.startswith(PREFIX)]


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
    store = open_store(where)
    for root in (store, store.child("checkpoints")):
        if steps(root):
            manifest, skipped = latest(root)
            if manifest is None:
                raise CheckpointError(f"{root} has no complete checkpoint: {'; '.join(skipped)}")
            return manifest
    return Manifest.read(store)


def rotate(
    root: Store, keep_last: int | None, *, newest: int, keep_every: int | None = None, keep: Collection[str] = ()
) -> None:
    """Delete old checkpoints.

    Args:
        root: folder of all checkpoints of a run.
        keep_last: how many to keep; None keeps all.
        newest: the step just saved. Later folders are damaged ones that were passed over, and must not count as kept.
        keep_every: those of every so many steps stay too.
        keep: names that stay.
    """
    if keep_last is None:
        return
    for name in [n for n in steps(root) if n <= folder_name(newest)][: -max(1, keep_last)]:
        number = name.removeprefix(PREFIX)
        if name in keep or (keep_every and number.isdigit() and int(number) % keep_every == 0):
            continue
        root.remove(name)

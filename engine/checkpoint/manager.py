"""The checkpoints of a run: saved while it goes on, rotated, found again after whatever happened."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from ..errors import CheckpointError, DrivetrainError
from .load import RestoredState
from .manifest import Manifest
from .retention import find_checkpoint, newest_first, recover, rotate, step_of, steps
from .safetensors_io import DamagedError
from .save import HostCopies, Snapshot, write_snapshot
from .storage import open_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..parallel.topology import Topology

log = logging.getLogger(__name__)

T = TypeVar("T")


class Checkpointable(Protocol):
    """What a `CheckpointManager` needs of an engine."""

    @property
    def topology(self) -> "Topology":
        """The engine's ranks."""
        ...

    def snapshot(self, step: int, extra: Mapping[str, Any] | None, copies: HostCopies) -> Snapshot:
        """Copy the state; see `CheckpointableEngine.snapshot`."""
        ...

    def live_snapshot(self, step: int, extra: Mapping[str, Any] | None = None) -> AbstractContextManager[Snapshot]:
        """View the state without a copy; see `CheckpointableEngine.live_snapshot`."""
        ...

    def load_checkpoint(self, folder: Path | str, *, verify: bool = True) -> RestoredState:
        """Restore the state; see `CheckpointableEngine.load_checkpoint`."""
        ...


class CheckpointManager:
    """Saves and restores an engine, of any backend. Every method but `failure` is collective over the engine's ranks.

    As a context manager it waits, at the end, for what is still being written.

    Args:
        engine: initialised.
        root: folder of all checkpoints of the run, or its URL.
        keep_last: how many to keep; None keeps all.
        keep_every: those of every so many steps are kept beside them.
        background: a save returns when the state has been copied to the host's memory, and is written meanwhile.
        verify: compare what is loaded with its checksums.
    """

    def __init__(
        self,
        engine: Checkpointable,
        root: Path | str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        background: bool = True,
        verify: bool = True,
    ) -> None:
        self._engine, self.root = engine, open_store(root)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._copies = HostCopies() if background else None
        self._verify = verify
        self._group: ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._damaged: set[str] = set()
        """Folders that were passed over: they do not count as kept."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:
            # The run has failed; what it saved before is nevertheless worth waiting for.
            self._thread.join()

    # ---- saving --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Get the room for copies ready while the first steps run: pages that are touched for the first time take longer to
        write than to copy into."""
        if self._copies is not None and self._thread is None:
            with self._engine.live_snapshot(0) as snapshot:
                pieces = list(snapshot.pieces)
            self._start("checkpoint-room", partial(self._copies.reserve, pieces))

    def _start(self, name: str, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as e:  # raised by the next call of the main thread
                self._failure = e

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def save(self, step: int, extra: Mapping[str, Any], *, keep: Collection[int] = (), last: bool = False) -> None:
        """Save as the step's checkpoint and delete those that are not to be kept. Waits for an earlier save.

        Args:
            step: number of the checkpoint.
            extra: JSON-able state of the trainer and the loader.
            keep: steps whose checkpoints stay.
            last: no step follows, so nothing is copied, and the save is complete when it returns.

        Raises:
            CheckpointError: this save, or the one before that was still being written, failed.
        """
        self.wait()
        topology = self._engine.topology
        if self._copies is None or last:
            with self._engine.live_snapshot(step, extra) as live:
                self._write(live, topology.host, keep)
            return
        snapshot = self._engine.snapshot(step, extra, self._copies)
        if self._group is None:
            # Of its own: collectives of two threads on one group would meet in different orders on different ranks.
            self._group = topology.private_group()
        self._start(f"checkpoint-{step}", partial(self._write, snapshot, self._group, keep))

    def _write(self, snapshot: Snapshot, group: "ProcessGroup", keep: Collection[int]) -> None:
        def rotated() -> None:
            try:
                damaged = {name for name in self._damaged if (step_of(name) or (-1, 0))[0] != snapshot.step}
                rotate(
                    self.root,
                    self._keep_last,
                    newest=snapshot.step,
                    keep_every=self._keep_every,
                    keep=keep,
                    damaged=damaged,
                )
            except OSError as e:
                raise CheckpointError(f"an old checkpoint in {self.root} cannot be removed: {e}") from e

        write_snapshot(snapshot, self.root, self._engine.topology, group, rotated)

    def failure(self) -> Exception | None:
        """What a save failed with meanwhile; not waited for. A loop asks after each step, and tells the other ranks."""
        return self._failure

    def wait(self) -> None:
        """Wait for a save that is being written.

        Raises:
            CheckpointError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    # ---- restoring -----------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Remove what crashed saves left behind; nobody else may be saving there."""
        with self._engine.topology.collective_errors():
            if self._engine.topology.is_main:
                try:
                    recover(self.root)
                    self.root.sweep()
                except OSError as e:
                    raise CheckpointError(f"{self.root} cannot be cleared of unfinished checkpoints: {e}") from e

    def present(self) -> list[str]:
        """Names of the checkpoint folders there are, oldest first, complete or not."""
        found: list[str] = self._on_main(lambda: steps(self.root))
        return found

    def _on_main(self, look: Callable[[], T]) -> T:
        """What the first rank sees, on all: another might see a shared file system a moment later. Its error is everybody's."""
        topology = self._engine.topology
        result: T | None = None
        with topology.collective_errors():
            if topology.is_main:
                try:
                    result = look()
                except CheckpointError:
                    raise
                except Exception as e:  # of many kinds: a disk's, or of any store's own library
                    raise CheckpointError(f"{self.root} cannot be read: {type(e).__name__} {e}") from e
        shared: T = topology.all_gather_object(result)[0]
        return shared

    def restore_last(self) -> tuple[str, RestoredState] | None:
        """Load the last checkpoint that is complete and undamaged, and say why others were passed over.

        Returns:
            where it lies, and what it says beside tensors; None where there is none to load.

        Raises:
            CheckpointError: of another model; of a format that is not known; or there are checkpoints, and all of them are damaged.
        """
        topology = self._engine.topology
        found = newest_first(self.root) if topology.is_main else iter(())
        reasons: list[str] = []
        while True:
            name, why = self._on_main(lambda: self._next(found))
            for reason in why:
                log.warning("not resumed from: %s", reason)
            reasons += why
            if name is None:
                if reasons:
                    # Some of their numbers may have been read already; and a run that began again would push the others out.
                    raise CheckpointError(
                        f"{self.root} has no checkpoint that is undamaged ({'; '.join(reasons)}); restore a copy of one, or "
                        "begin again in another folder"
                    )
                return None
            folder = str(self.root.child(name))
            try:
                return folder, self._engine.load_checkpoint(folder, verify=self._verify)
            except DrivetrainError as e:
                damages = [d for d in topology.all_gather_object(str(e) if isinstance(e, DamagedError) else None) if d]
                if not damages:
                    raise
                log.warning("not resumed from: %s", damages[0])
                reasons.append(damages[0])
                self._damaged.add(name)

    @staticmethod
    def _next(found: Any) -> tuple[str | None, list[str]]:
        """The next checkpoint that looks complete, and why those before it do not."""
        why: list[str] = []
        for name, manifest in found:
            if isinstance(manifest, Manifest):
                return name, why
            if not isinstance(manifest, DamagedError):
                # Whole, and of a newer version say: to go on from an older one would push it out.
                raise manifest
            why.append(str(manifest))
        return None, why

    def restore(self, where: Path | str) -> tuple[str, RestoredState]:
        """Load a checkpoint: itself, or the last one of a run.

        Raises:
            CheckpointError: there is none, or it cannot be used.
        """
        folder = self._on_main(lambda: str(find_checkpoint(where).store))
        return folder, self._engine.load_checkpoint(folder, verify=self._verify)

    def restore_step(self, step: int) -> RestoredState:
        """Load the checkpoint of a step, once nothing is being written any more."""
        self.wait()
        names = [name for name in self.present() if (step_of(name) or (-1, 0))[0] == step]
        if not names:
            raise CheckpointError(f"{self.root} has no checkpoint of step {step}")
        return self._engine.load_checkpoint(str(self.root.child(names[-1])), verify=self._verify)

"""A run's checkpoints: saving during training, rotation, and resuming after a crash."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from ..errors import CheckpointError, DrivetrainError
from ..parallel.collectives import call_on_first
from .load import RestoredState
from .manifest import CheckpointManifest
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
    """The interface that `CheckpointManager` requires of an engine."""

    @property
    def topology(self) -> "Topology":
        """The engine's topology."""
        ...

    def snapshot(self, step: int, extra: Mapping[str, Any] | None, copies: HostCopies) -> Snapshot:
        """Copy the state; see `BaseEngine.snapshot`."""
        ...

    def live_snapshot(self, step: int, extra: Mapping[str, Any] | None = None) -> AbstractContextManager[Snapshot]:
        """View the state without copying it; see `BaseEngine.live_snapshot`."""
        ...

    def load_checkpoint(self, folder: Path | str, *, verify: bool = True) -> RestoredState:
        """Restore the state; see `BaseEngine.load_checkpoint`."""
        ...


class CheckpointManager:
    """Saves and restores an engine of any backend. Every method except `failure` is collective over the engine's ranks.

    As a context manager, it waits on exit for the save that is still being written.

    Args:
        engine: The initialized engine.
        root: The folder of all checkpoints of the run, or its URL.
        keep_last: The number of checkpoints to keep; None keeps all.
        keep_every: The step interval at which checkpoints are kept permanently; None for none.
        background: Whether a save returns once the state has been copied to host memory, and is written in the background.
        verify: Whether to verify checksums when loading.
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
        """The names of damaged folders that were skipped: they do not count as kept."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:
            # The run has failed, but the checkpoint that is still being written is worth waiting for.
            self._thread.join()

    # ---- saving --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Allocate the host buffers while the first steps run.

        Touching memory pages for the first time takes longer than copying into them.
        """
        if self._copies is not None and self._thread is None:
            # Only for the sizes of the shards; the step does not matter.
            with self._engine.live_snapshot(0) as snapshot:
                shards = list(snapshot.local_shards)
            self._start("checkpoint-buffers", partial(self._copies.reserve, shards))

    def _start(self, name: str, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as e:  # raised by the next call of the main thread
                self._failure = e

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def save(self, step: int, extra: Mapping[str, Any], *, keep: Collection[int] = (), last: bool = False) -> None:
        """Save the step's checkpoint and delete those that are no longer to be kept. Waits for an earlier save.

        Args:
            step: The step of the checkpoint.
            extra: The JSON-serializable state of the trainer and the data loader.
            keep: The steps whose checkpoints are kept.
            last: Whether no step follows; then nothing is copied, and the save is complete on return.

        Raises:
            CheckpointError: This save failed, or the previous one, which was still being written.
        """
        # The earlier save still reads the host buffers that this one would write to.
        self.wait()
        topology = self._engine.topology
        if self._copies is None or last:
            with self._engine.live_snapshot(step, extra) as live:
                self._write(live, topology.host, keep)
            return
        snapshot = self._engine.snapshot(step, extra, self._copies)
        if self._group is None:
            # A separate group: collectives of two threads on the same group would run in different orders on different ranks.
            self._group = topology.private_group()
        self._start(f"checkpoint-{step}", partial(self._write, snapshot, self._group, keep))

    def _write(self, snapshot: Snapshot, group: "ProcessGroup", keep: Collection[int]) -> None:
        def rotate_checkpoints() -> None:
            try:
                # A damaged checkpoint of this very step has just been replaced by the new one.
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

        write_snapshot(snapshot, self.root, self._engine.topology, group, rotate_checkpoints)

    def failure(self) -> Exception | None:
        """Return the error of a failed background save, or None, without waiting for it.

        The training loop calls this after each step and reports the error to the other ranks.
        """
        return self._failure

    def wait(self) -> None:
        """Wait for the save that is being written.

        Raises:
            CheckpointError: The save failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    # ---- restoring -----------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Remove what crashed saves left behind. No other process may be saving there."""
        with self._engine.topology.collective_errors():
            if self._engine.topology.is_main:
                try:
                    recover(self.root)
                    self.root.sweep()
                except OSError as e:
                    raise CheckpointError(f"{self.root} cannot be cleared of unfinished checkpoints: {e}") from e

    def present(self) -> list[str]:
        """Return the names of the existing checkpoint folders, oldest first, complete or not."""
        names: list[str] = self._on_main(lambda: steps(self.root))
        return names

    def _on_main(self, read: Callable[[], T]) -> T:
        """Call `read` on rank 0 and return its result on all ranks; its error is raised on all ranks.

        The other ranks do not read themselves, because they may see changes of a shared file system later.
        """

        def read_store() -> T:
            try:
                return read()
            except CheckpointError:
                raise
            except Exception as e:  # disk errors, or any error of the library behind a store
                raise CheckpointError(f"{self.root} cannot be read: {type(e).__name__} {e}") from e

        return call_on_first(read_store, self._engine.topology.host)

    def restore_last(self) -> tuple[str, RestoredState] | None:
        """Load the last complete and undamaged checkpoint, and log why later ones were skipped.

        Returns:
            The checkpoint's location and its non-tensor state; None if there are no checkpoints.

        Raises:
            CheckpointError: The checkpoint is of another model or an unknown format, or all checkpoints are damaged.
        """
        topology = self._engine.topology
        # Only rank 0 reads the folder, and keeps its place between attempts.
        candidates = newest_first(self.root) if topology.is_main else iter(())
        reasons: list[str] = []
        while True:
            name, skipped = self._on_main(lambda: self._next(candidates))
            for reason in skipped:
                log.warning("checkpoint skipped: %s", reason)
            reasons += skipped
            if name is None:
                if reasons:
                    # Some tensors may have been loaded already, and a run that started over would rotate the checkpoints out.
                    raise CheckpointError(
                        f"{self.root} has no undamaged checkpoint ({'; '.join(reasons)}); restore one from a backup, or "
                        "start over in another folder"
                    )
                return None
            folder = str(self.root.child(name))
            try:
                return folder, self._engine.load_checkpoint(folder, verify=self._verify)
            except Exception as e:
                # The rank that found the damage has a `DamagedError`, the others a `RemoteError`. They exchange which it was,
                # so that all try the next checkpoint or none does. Any other error is raised on all ranks by the exchange,
                # which the others would otherwise wait in.
                damage = str(e) if isinstance(e, DamagedError) else None
                unexpected = None if isinstance(e, DrivetrainError) else e
                damages = [d for d in topology.all_gather_object(damage, error=unexpected) if d]
                if not damages:
                    raise
                log.warning("checkpoint skipped: %s", damages[0])
                reasons.append(damages[0])
                self._damaged.add(name)

    @staticmethod
    def _next(candidates: Any) -> tuple[str | None, list[str]]:
        """Return the next checkpoint that looks complete, and the reasons why those before it do not."""
        skipped: list[str] = []
        for name, manifest in candidates:
            if isinstance(manifest, CheckpointManifest):
                return name, skipped
            if not isinstance(manifest, DamagedError):
                # It is intact but, for example, of a newer format version. Resuming from an older checkpoint would rotate it out.
                raise manifest
            skipped.append(str(manifest))
        return None, skipped

    def restore(self, where: Path | str) -> tuple[str, RestoredState]:
        """Load the checkpoint at a path or URL: the folder itself, or the last checkpoint of a run.

        Raises:
            CheckpointError: There is none, or it cannot be used.
        """
        folder = self._on_main(lambda: str(find_checkpoint(where).store))
        return folder, self._engine.load_checkpoint(folder, verify=self._verify)

    def restore_step(self, step: int) -> RestoredState:
        """Load the checkpoint of a step, after waiting for the save that is being written."""
        self.wait()
        present = self.present()
        names = [name for name in present if (step_of(name) or (-1, 0))[0] == step]
        if not names:
            steps = ", ".join(str(number[0]) for name in present if (number := step_of(name)) is not None)
            raise CheckpointError(
                f"{self.root} has no checkpoint of step {step}; it has {f'those of {steps}' if steps else 'none'}"
            )
        return self._engine.load_checkpoint(str(self.root.child(names[-1])), verify=self._verify)

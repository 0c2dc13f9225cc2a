"""Ends a worker whose executor has made no progress for too long."""

import os
import sys
import threading
import time
import traceback

from ...engine import progress
from ...engine.parallel.process import exit_process
from ..protocol.messages import Error
from ..protocol.transports.base import Transport
from .worker import ModelWorker

ABORT_S = 10.0
"""The time limit for aborting the communicator, in seconds."""
OTHERS_S = 1.5
"""How long the process keeps running after its report, in seconds."""
EXIT_CODE = 70
# The I/O thread checks several times a second, so a gap of this length means that the process did not run.
_GAP_S = 5.0


class Watchdog:
    """Distinguishes a stuck collective from a slow batch: only time without progress counts.

    Args:
        worker: The worker whose executor is watched.
    """

    def __init__(self, worker: ModelWorker) -> None:
        self._worker = worker
        self.executor = 0
        self._checked_at = time.monotonic()

    def check(self) -> Error | None:
        """Take a request without progress away from the executor, and return its reply; None if all is well."""
        running = self._worker.running()
        if running is None:
            self._checked_at = time.monotonic()
            return None
        now, done = time.monotonic(), progress.finished()
        # After a gap between checks the whole process was suspended, so the executor could not make progress.
        if done != running.seen or now - self._checked_at > _GAP_S:
            running.seen, running.seen_at = done, now
        self._checked_at = now
        limit = self._worker.settings.watchdog_of(running.op)
        if not limit or now - running.seen_at < limit or not self._worker.abandon(running):
            return None
        rank, size = self._worker.settings.rank, self._worker.settings.world_size
        message = (
            f"rank {rank} of {size} made no progress in {running.title} for {now - running.seen_at:.0f} s, "
            f"{self._position()}; it ends, and its group cannot be used any further (the limit is {limit:g} s: watchdog_s of a "
            "group, --watchdog of a worker)"
        )
        return Error(id=running.request.id, kind="watchdog", message=message)

    def _position(self) -> str:
        """Return where the executor is: waiting for other ranks, or somewhere else."""
        frame = sys._current_frames().get(self.executor)
        if frame is None:
            return "outside of Python"
        stack = traceback.extract_stack(frame)
        user_frame = next((s for s in reversed(stack) if "/torch/" not in s.filename), stack[-1])
        place = f"{stack[-1].name} of {stack[-1].filename}:{stack[-1].lineno}"
        if any("/torch/distributed/" in s.filename for s in stack[-6:]):
            return f"waiting for other ranks in {place}, called by {user_frame.name}"
        return f"in {place}"

    def end_process(self, transport: Transport) -> None:
        """Abort the communicator, so that peers on GPUs do not wait for this rank, and exit."""
        # The process must exit even if something blocks from here on, such as a full pipe or a lock of the executor.
        last = threading.Timer(2 * ABORT_S, os._exit, (EXIT_CODE,))
        last.daemon = True
        last.start()
        # The other ranks are about to report their own positions; exiting now would break their connections first.
        time.sleep(OTHERS_S)
        transport.close()
        if "torch" in sys.modules:
            abort = threading.Thread(target=_abort, daemon=True)
            abort.start()
            abort.join(ABORT_S)
        exit_process(EXIT_CODE)


def _abort() -> None:
    from ...engine.parallel.process_groups import abort_distributed

    abort_distributed()

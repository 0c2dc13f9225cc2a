"""Handling of SIGTERM and the first Ctrl-C as a request to finish the step, save and exit."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

from ...engine.parallel.topology import Topology


class StopSignal:
    """A context manager that catches SIGTERM and Ctrl-C, and restores the previous handlers at the end.

    A second Ctrl-C interrupts immediately. Signals only reach the main thread; in any other thread nothing is caught.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that this process has received first, if any."""

    def __enter__(self) -> Self:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            # The next Ctrl-C is no longer caught.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if os.environ.get("RANK", "0") == "0":
                # Not print, which the signal may have interrupted.
                os.write(2, b"\nstopping after this step; Ctrl-C again to stop at once\n")
        self.number = self.number or number

    @property
    def requested_here(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.number is not None

    def stop_requested(self, topology: Topology, error: Exception | None = None) -> bool:
        """Tell whether any rank was asked to stop. Collective.

        The signal reaches the ranks at different times, and a rank that stopped on its own would leave the others waiting in
        the next step.

        Args:
            topology: The engine's topology.
            error: This rank's error, which the same exchange between ranks raises on all ranks.
        """
        return any(topology.all_gather_object(self.requested_here, error=error))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._main:
            for number, handler in self._before.items():
                signal.signal(number, handler)

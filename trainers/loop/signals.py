"""Handling of SIGTERM and the first Ctrl-C as a request to finish the step, save and exit."""

import math
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

from ...engine.parallel.topology import Topology


class StopSignal:
    """A context manager that catches SIGTERM and Ctrl-C, and restores the previous handlers at the end.

    A second Ctrl-C interrupts immediately. Signals only reach the main thread; in any other thread nothing is caught.

    Args:
        max_minutes: The minutes from now after which time is up; None for no limit.
    """

    def __init__(self, max_minutes: float | None = None) -> None:
        self.number: int | None = None
        """The signal that this process has received first, if any."""
        self._deadline = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes

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

    @property
    def time_is_up_here(self) -> bool:
        """Whether the limit of time has passed by this rank's clock."""
        return time.monotonic() >= self._deadline

    def time_is_up_or_requested(self, topology: Topology, error: Exception | None = None) -> tuple[bool, bool]:
        """Tell whether time is up by the clock of any rank, and whether any was asked to stop. Collective.

        The signal reaches the ranks at different times, and a rank that stopped on its own would leave the others waiting in
        the next step.

        Args:
            topology: The engine's topology.
            error: This rank's error, which the same exchange between ranks raises on all ranks.
        """
        ranks = topology.all_gather_object((self.time_is_up_here, self.requested_here), error=error)
        return any(up for up, _ in ranks), any(requested for _, requested in ranks)

    def stop_requested(self, topology: Topology) -> bool:
        """Tell whether any rank was asked to stop. Collective."""
        return self.time_is_up_or_requested(topology)[1]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._main:
            for number, handler in self._before.items():
                signal.signal(number, handler)

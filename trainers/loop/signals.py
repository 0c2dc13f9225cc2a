"""Handling of SIGTERM and the first Ctrl-C as a request to finish the step, save and exit."""

import math
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

from .ranks import TrainerRanks


class StopSignal:
    """A context manager that catches SIGTERM and Ctrl-C, and restores the previous handlers at the end.

    A second Ctrl-C interrupts immediately. Signals only reach the main thread; in any other thread nothing is caught.

    Args:
        ranks: The processes that stop together.
        max_minutes: The time limit from now, in minutes; None for no limit.
    """

    def __init__(self, ranks: TrainerRanks, max_minutes: float | None = None) -> None:
        self._ranks = ranks
        self.number: int | None = None
        """The first signal that this process received, if any."""
        self.is_requested = self.is_time_up = False
        """Whether any rank was asked to stop, and whether time is up on any rank's clock, as of the last exchange."""
        # The monotonic clock does not jump when the time of the machine is set.
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
                # Do not use print, which the signal may have interrupted.
                os.write(2, b"\nstopping after this step; Ctrl-C again to stop at once\n")
        # Only noted here: the step continues, and the next exchange acts on it on all ranks.
        self.number = self.number or number

    def exchange(self, error: Exception | None = None) -> None:
        """Agree with the other ranks on whether to stop. Collective.

        A signal reaches the ranks at different times, and a rank that stopped on its own would leave the others waiting in the next
        step.

        Args:
            error: This rank's error, which the same exchange between ranks raises on all ranks.
        """
        states = self._ranks.all_gather_object((self.is_requested_here, time.monotonic() >= self._deadline), error=error)
        self.is_requested, self.is_time_up = (any(flags) for flags in zip(*states, strict=True))

    @property
    def is_requested_here(self) -> bool:
        """Whether this process was asked to stop."""
        return self.number is not None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._main:
            for number, handler in self._before.items():
                signal.signal(number, handler)

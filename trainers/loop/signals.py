"""SIGTERM, and the first Ctrl-C, as a request: finish the step, save, leave."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

from ...engine.parallel.collectives import error_text, raise_agreed
from ...engine.parallel.topology import Topology


class StopSignal:
    """Catches the two signals while it is entered. What came before is put back at the end. A second Ctrl-C interrupts at once.

    Signals reach main threads alone; in another one nothing is caught.
    """

    def __init__(self) -> None:
        self._asked = False

    def __enter__(self) -> Self:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            # The next one is not caught any more.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._asked = True

    @property
    def here(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._asked

    def asked(self, topology: Topology, error: Exception | None = None) -> bool:
        """Whether any rank was asked to stop. Collective: the signal reaches the ranks at different moments, and one that
        left alone would leave the others waiting in the next step.

        Args:
            topology: of the engine.
            error: of this rank, made everybody's on the way, as `Topology.agree` does.
        """
        found = topology.all_gather_object((self._asked, error_text(error)))
        raise_agreed(error, ((rank, text) for rank, (_, text) in enumerate(found)))
        return any(asked for asked, _ in found)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._main:
            for number, handler in self._before.items():
                signal.signal(number, handler)

"""Loading weights that arrive in parts."""

import queue
import threading
from collections.abc import Callable, Iterator

from torch import Tensor

from ...engine import progress


class WeightReceiver:
    """Loads a stream of weights in a thread while its parts are still arriving.

    Args:
        load: The function that consumes the stream.
    """

    def __init__(self, load: Callable[[Iterator[tuple[str, Tensor]]], None]) -> None:
        self._parts: queue.Queue[list[tuple[str, Tensor]] | None] = queue.Queue(maxsize=1)
        self._load = load
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._load(pair for part in iter(self._parts.get, None) for pair in part)
        except Exception as e:  # raised by finish
            self._error = e
            while self._parts.get() is not None:
                # Drain the remaining parts, so that their sender does not block.
                pass

    def put(self, part: list[tuple[str, Tensor]]) -> None:
        """Pass on one part."""
        self._parts.put(part)
        progress.advance()

    def finish(self) -> None:
        """Wait until all parts are loaded; re-raise any error."""
        self._parts.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

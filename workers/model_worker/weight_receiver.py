"""Loading weights that arrive in parts."""

import queue
import threading
from collections.abc import Callable, Iterator

from torch import Tensor

from ...engine import progress
from ...engine.errors import ConfigError


class WeightReceiver:
    """Loads a stream of weights in a thread while its parts are still arriving.

    Args:
        load: The function that consumes the stream.
    """

    def __init__(self, load: Callable[[Iterator[tuple[str, Tensor]]], None]) -> None:
        self._parts: queue.Queue[list[tuple[str, Tensor]] | None] = queue.Queue(maxsize=1)
        self._load = load
        self._error: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._load(self._pairs())
            if not self._ended:
                self._error = ConfigError("load_weights returned before it had read all weights; read the stream to its end")
        except BaseException as e:  # raised by finish
            self._error = e
        while not self._ended:
            # Drain the remaining parts, so that their sender does not block.
            self._ended = self._parts.get() is None

    def _pairs(self) -> Iterator[tuple[str, Tensor]]:
        while (part := self._parts.get()) is not None:
            yield from part
        self._ended = True

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

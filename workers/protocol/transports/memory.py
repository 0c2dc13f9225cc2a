"""The transport inside a Ray actor, where another thread of the same process passes on the frames."""

import queue
import threading
from concurrent.futures import Future

import msgspec

from .base import Frame, FrameTooLargeError

DELIVERY_S = 2.0
"""The time that the last reply gets to leave the process, in seconds."""


class _MemoryEnvelope(msgspec.Struct):
    id: int | None = None


class MemoryTransport:
    """Hands requests of another thread to the request loop, and its replies back."""

    binary = True
    greets = False

    def __init__(self) -> None:
        self._incoming: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._waiting: dict[int, Future[Frame]] = {}
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(_MemoryEnvelope)

    def post(self, number: int, frame: Frame) -> None:
        """Hand over a request with this id."""
        self._incoming.put(frame)

    def fail(self, number: int, error: Exception) -> None:
        """Let `wait` raise an error, because the request could not be handed over."""
        self._future(number).set_exception(error)

    def wait(self, number: int) -> Frame:
        """Wait for the reply to the request with this id, which may not have been handed over yet."""
        future = self._future(number)
        try:
            return future.result()
        finally:
            # After an error too. If the wait itself was interrupted, the reply may still come, and is kept.
            if future.done():
                with self._lock:
                    self._waiting.pop(number, None)

    def _future(self, number: int) -> "Future[Frame]":
        with self._lock:
            return self._waiting.setdefault(number, Future())

    def receive(self, timeout_s: float, *, reading: bool) -> list[Frame | FrameTooLargeError] | None:
        """Return the frames that have arrived; see `Transport.receive`."""
        try:
            # `reading` is not needed: requests that come through Ray have ids, and are refused if the queue is full.
            frame = self._incoming.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [] if frame is None else [frame]

    def wake(self) -> None:
        """End the wait of `receive`."""
        self._incoming.put(None)

    def send(self, frame: Frame) -> None:
        """Pass on a reply."""
        number = self._decoder.decode(frame[0]).id
        # Messages without an id are those that no request asked for, such as heartbeats. Ray itself monitors its
        # processes.
        if number is not None:
            self._future(number).set_result(frame)

    def close(self) -> None:
        """Wait until the last reply has left: the process is about to end."""
        threading.Event().wait(DELIVERY_S)

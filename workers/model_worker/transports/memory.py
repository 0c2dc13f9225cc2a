"""Frames that a thread of the same process passes on, one at a time: the transport inside a Ray actor. Imports no torch."""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from .base import Frame, FrameTooLargeError

DELIVERY_S = 2.0
"""For how long the last reply may take to leave the process."""


class _Envelope(msgspec.Struct):
    id: int | None = None


class MemoryTransport:
    """Hands requests of another thread to the request loop, and its replies back."""

    binary = True
    greets = False

    def __init__(self) -> None:
        self._incoming: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._waiting: dict[int, Future[Frame]] = {}
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(_Envelope)

    def exchange(self, frames: Sequence[tuple[int, Frame]]) -> list[Frame]:
        """Send requests one after the other, and wait for their replies.

        Args:
            frames: The id and the frame of each.
        """
        futures: list[Future[Frame]] = []
        with self._lock:
            for number, frame in frames:
                future: Future[Frame] = Future()
                futures.append(future)
                self._waiting[number] = future
                self._incoming.put(frame)
        return [future.result() for future in futures]

    def receive(self, timeout_s: float, *, reading: bool) -> list[Frame | FrameTooLargeError] | None:
        """Return the frames that have arrived; see `Transport.receive`."""
        try:
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
        with self._lock:
            future = self._waiting.pop(number, None) if number is not None else None
        if future is not None:
            future.set_result(frame)

    def close(self) -> None:
        """Wait until the last reply has left: the process is about to end."""
        threading.Event().wait(DELIVERY_S)

"""Frames that a thread of the same process passes on, one at a time: the transport inside a Ray actor. Imports no torch."""

import queue
import threading

from .base import Frame, FrameTooLargeError

DELIVERY_S = 2.0
"""For how long the last reply may take to leave the process."""


class MemoryTransport:
    """Hands requests of another thread to the request loop, and its replies back."""

    binary = True
    greets = False

    def __init__(self) -> None:
        self._incoming: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Frame] = queue.SimpleQueue()

    def exchange(self, frame: Frame) -> Frame:
        """Send a request and wait for its reply. Not to be called by two threads at once."""
        self._incoming.put(frame)
        return self._replies.get()

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
        self._replies.put(frame)

    def close(self) -> None:
        """Wait until the last reply has left: the process is about to end."""
        threading.Event().wait(DELIVERY_S)

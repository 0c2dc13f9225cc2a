"""The interface between the request loop and a transport."""

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from ..codec import FramePart


class FrameTooLargeError(ValueError):
    """A frame is larger than the transport accepts; it was skipped."""


class ControllerLostError(ConnectionError):
    """The controller no longer reads the replies of this worker."""


Frame = Sequence[FramePart]
"""A message: its header, and the parts that hold tensors."""


class WorkerKeys(Protocol):
    """The keys that a controller passes to a process that it starts, and by which the two authenticate each other."""

    def pass_on(self) -> int:
        """Return a file descriptor from which a child can read the keys: the worker's `--keys-fd`."""
        ...


class Transport(Protocol):
    """The worker's end of a connection to a controller. Only the I/O thread receives; any thread may send.

    Args:
        binary: Whether frames are msgpack with parts, instead of lines of JSON.
        greets: Whether the worker sends the first message, before which the controller sends nothing.
    """

    binary: bool
    greets: bool

    def receive(self, timeout_s: float, *, reading: bool) -> list[Frame | FrameTooLargeError] | None:
        """Return the frames that have arrived; an empty list after the timeout.

        Args:
            timeout_s: How long to wait, in seconds.
            reading: Whether to read; otherwise frames are left unread, and their sender is held back.

        Returns:
            The frames; None at the end of the input. After the end it only waits.

        Raises:
            ControllerLostError: The controller is gone.
        """
        ...

    def send(self, frame: Frame) -> None:
        """Send a message.

        Raises:
            ControllerLostError: The controller is gone.
        """
        ...

    def wake(self) -> None:
        """End the wait of `receive` in the I/O thread."""
        ...

    def close(self) -> None:
        """Send the remaining messages, and close the connection. Only called after the I/O thread has ended."""
        ...


class Wakeup:
    """Ends the wait of another thread that polls `fileno`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """Return the descriptor to poll for input."""
        return self._read

    def set(self) -> None:
        """Wake the other thread."""
        # If the pipe is full, the other thread is about to wake anyway.
        with suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Forget past calls of `set`."""
        with suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._read)
        os.close(self._write)
